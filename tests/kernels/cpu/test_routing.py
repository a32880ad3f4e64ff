"""The native routing against torch's: the same experts and places, weights to a rounding, each row on its own."""

import pytest
import torch
from torch import Tensor

from kernels import routing
from kernels.cpu.native import NativeKernels
from kernels.routing import GroupLimit, Routed, RoutingRule
from tests.kernels.cpu.harness import assert_same_bits, case, normal

INFINITE, NAN = float("inf"), float("nan")


def bias(num_experts: int) -> Tensor:
    """In no order: if it rose with the numbers, the last groups would be the best by any of their experts."""
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(5))
    return torch.linspace(-0.2, 0.2, num_experts)[order]


RULES: list[tuple[int, RoutingRule]] = [
    (1, RoutingRule(1, True)),
    (8, RoutingRule(2, True)),
    (60, RoutingRule(4, False)),
    (128, RoutingRule(8, True)),
    (37, RoutingRule(37, False)),
    (64, RoutingRule(6, False, limit=GroupLimit(8, 3, 1), scale=16.0)),
    (160, RoutingRule(6, False, "softmax", None, GroupLimit(8, 3, 1), 16.0)),
    (256, RoutingRule(8, True, "sigmoid", bias(256), GroupLimit(8, 4, 2), 2.5)),
    (36, RoutingRule(3, True, "sigmoid", bias(36), None, 0.5)),
    (9, RoutingRule(3, True, "sigmoid", None, GroupLimit(9, 5, 1))),
]
"""(experts, rule): Mixtral's, Qwen's, DeepSeek-V2's and V3's, and sizes that are not whole vectors."""


def check(found: Routed, expected: Routed, scale: float) -> None:
    assert torch.equal(found.chosen.experts, expected.chosen.experts)
    assert (found.chosen.weights - expected.chosen.weights).abs().max() <= 1e-6 * scale
    assert found.by_expert.spans == expected.by_expert.spans
    assert torch.equal(found.by_expert.rows, expected.by_expert.rows)
    assert torch.equal(found.by_expert.places, expected.by_expert.places)


def test_as_torch_routes(native: NativeKernels) -> None:
    for (num_experts, rule), rows in ((each, rows) for each in RULES for rows in (1, 5, 300)):
        logits = normal(rows, num_experts, dtype=torch.float32, seed=rows, scale=3.0)
        with case(num_experts, rule, rows):
            check(native.route(logits, rule), routing.route(logits, rule), rule.scale)


def test_a_row_depends_on_itself_alone(native: NativeKernels) -> None:
    """In any company and order; far more rows than one thread takes."""
    for num_experts, rule in RULES:
        logits = normal(600, num_experts, dtype=torch.float32, seed=2, scale=3.0)
        together = native.route(logits, rule).chosen
        backwards = native.route(logits.flip(0), rule).chosen
        with case(num_experts, rule):
            assert torch.equal(backwards.experts.flip(0), together.experts)
            assert_same_bits(backwards.weights.flip(0), together.weights)
            for row in range(0, 600, 43):
                alone = native.route(logits[row : row + 1], rule).chosen
                assert torch.equal(alone.experts[0], together.experts[row])
                assert_same_bits(alone.weights[0], together.weights[row])


def test_ties_go_to_the_lower_number(native: NativeKernels) -> None:
    logits = torch.zeros(3, 64)
    logits[:, [9, 40, 63]] = 1.0
    assert native.route(logits, RoutingRule(5, True)).chosen.experts.tolist() == [[9, 40, 63, 0, 1]] * 3
    limited = RoutingRule(5, True, "sigmoid", limit=GroupLimit(8, 2, 2))
    assert native.route(torch.zeros(3, 64), limited).chosen.experts.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_what_is_not_finite_stays_in_its_row(native: NativeKernels) -> None:
    """Its experts are torch's too, so that they are some of those that there are."""
    for num_experts, rule in RULES:
        logits = normal(7, num_experts, dtype=torch.float32, seed=3)
        broken = logits.clone()
        broken[1, num_experts // 2] = NAN
        broken[2] = NAN
        broken[3, -1] = -INFINITE
        broken[4] = -INFINITE
        broken[5, 0] = 200.0
        broken[6, -1] = INFINITE
        with case(num_experts, rule):
            found, expected = native.route(broken, rule).chosen, routing.choose(broken, rule)
            assert torch.equal(found.experts, expected.experts)
            assert torch.equal(found.weights.isnan(), expected.weights.isnan())
            assert_same_bits(found.weights[:1], native.route(logits, rule).chosen.weights[:1])


def test_what_does_not_fit_is_refused(native: NativeKernels) -> None:
    for logits, rule in (
        (torch.zeros(2, 8).double(), RoutingRule(2, True)),
        (torch.zeros(2, 8), RoutingRule(9, True)),
        (torch.zeros(2, 8), RoutingRule(0, True)),
        (torch.zeros(2, 8), RoutingRule(2, True, "sigmoid", torch.zeros(7))),
        (torch.zeros(2, 8), RoutingRule(2, True, limit=GroupLimit(3, 1, 1))),
        (torch.zeros(2, 8), RoutingRule(2, True, limit=GroupLimit(4, 5, 1))),
        (torch.zeros(2, 8), RoutingRule(2, True, limit=GroupLimit(4, 1, 3))),
    ):
        with pytest.raises(ValueError, match="experts"):
            native.route(logits, rule)
    assert native.route(torch.zeros(0, 8), RoutingRule(2, True)).by_expert.spans == ()
