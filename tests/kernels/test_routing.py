"""Routing to experts: against float64, what ties do, and rows that don't see each other."""

import pytest
import torch

from kernels.routing import route

LOGITS = torch.randn(41, 12, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("normalize", [True, False])
def test_the_likeliest_experts_and_their_weights(normalize: bool) -> None:
    routing = route(LOGITS, 3, normalize=normalize)
    values, experts = LOGITS.double().softmax(-1).topk(3)
    if normalize:
        values = values / values.sum(-1, keepdim=True)
    assert torch.equal(routing.experts, experts)
    assert (routing.weights - values).abs().max() < 1e-6
    assert routing.weights.dtype == torch.float32


def test_ties_go_to_the_lower_number() -> None:
    logits = torch.zeros(5, 64)
    logits[:, [9, 40, 63]] = 1.0
    for rows in (1, 5):
        assert route(logits[:rows], 5, normalize=True).experts.tolist() == [[9, 40, 63, 0, 1]] * rows


def test_a_group_is_an_experts_rows_in_order() -> None:
    routing = route(LOGITS, 2, normalize=True)
    seen = {}
    for group in routing.groups(12):
        assert group.rows.tolist() == sorted(group.rows.tolist())
        for row, place in zip(group.rows.tolist(), group.places.tolist(), strict=True):
            assert (place // 2, int(routing.experts.flatten()[place])) == (row, group.expert)
            seen[place] = group.expert
    assert sorted(seen) == list(range(82))


def test_results_are_summed_by_weight() -> None:
    routing = route(LOGITS, 3, normalize=False)
    results = torch.randn(41 * 3, 20, generator=torch.Generator().manual_seed(4))
    expected = (results.view(41, 3, 20).double() * routing.weights.double()[..., None]).sum(1)
    assert (routing.combine(results) - expected).abs().max() < 1e-6


def test_a_row_depends_on_itself_alone() -> None:
    results = torch.randn(41 * 3, 20, generator=torch.Generator().manual_seed(4)).bfloat16()
    routing = route(LOGITS, 3, normalize=True)
    combined = routing.combine(results)
    for row in range(41):
        alone = route(LOGITS[row : row + 1], 3, normalize=True)
        assert torch.equal(alone.experts[0], routing.experts[row])
        assert torch.equal(alone.weights[0], routing.weights[row])
        assert torch.equal(alone.combine(results[3 * row : 3 * row + 3])[0], combined[row])
