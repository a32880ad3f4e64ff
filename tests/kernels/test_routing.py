"""Routing to experts: against float64, what ties do, and rows that don't see each other."""

from typing import Any

import pytest
import torch

from kernels.routing import GroupLimit, combine, route, route_scored

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


def test_a_span_is_an_experts_rows_in_order() -> None:
    routing = route(LOGITS, 2, normalize=True)
    found, end = routing.sort(12), 0
    experts = torch.full((82,), -1)
    for expert, start, stop in found.spans:
        assert start == end < stop
        rows, end = found.rows[start:stop].tolist(), stop
        assert rows == sorted(rows)
        experts[start:stop] = expert
    assert end == 82
    assert torch.equal(experts[found.places], routing.experts)
    assert torch.equal(found.rows[found.places], torch.arange(41)[:, None].expand(-1, 2))


def test_results_are_summed_by_weight() -> None:
    routing = route(LOGITS, 3, normalize=False)
    places = routing.sort(12).places
    results = torch.randn(41 * 3, 20, generator=torch.Generator().manual_seed(4))
    expected = (results[places].double() * routing.weights.double()[..., None]).sum(1)
    assert (combine(results, routing.weights, places) - expected).abs().max() < 1e-6


def test_a_row_depends_on_itself_alone() -> None:
    results = torch.randn(41 * 3, 20, generator=torch.Generator().manual_seed(4)).bfloat16()
    routing = route(LOGITS, 3, normalize=True)
    in_order = torch.arange(41 * 3).view(41, 3)
    combined = combine(results, routing.weights, in_order)
    for row in range(41):
        alone = route(LOGITS[row : row + 1], 3, normalize=True)
        assert torch.equal(alone.experts[0], routing.experts[row])
        assert torch.equal(alone.weights[0], routing.weights[row])
        own = combine(results[3 * row : 3 * row + 3], alone.weights, in_order[:1])
        assert torch.equal(own[0], combined[row])


SETTINGS: list[dict[str, Any]] = [
    {"scoring": "softmax", "bias": None, "limit": None, "normalize": False, "scale": 1.0},
    {"scoring": "softmax", "bias": None, "limit": GroupLimit(4, 2, 1), "normalize": False, "scale": 16.0},
    {"scoring": "sigmoid", "bias": True, "limit": GroupLimit(3, 2, 2), "normalize": True, "scale": 2.5},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_scores_within_groups(settings: dict[str, Any]) -> None:
    """Against plain loops in float64, and each row alone."""
    bias = torch.linspace(-0.3, 0.3, 12) if settings["bias"] else None
    settings = settings | {"bias": bias}
    routing = route_scored(LOGITS, 3, **settings)
    for row, logits in enumerate(LOGITS):
        wide = logits.double()
        scores = wide.softmax(-1) if settings["scoring"] == "softmax" else wide.sigmoid()
        ranking = scores if bias is None else scores + bias.double()
        allowed = range(12)
        if limit := settings["limit"]:
            groups = ranking.view(limit.num_groups, -1)
            best = groups.topk(limit.best).values.sum(-1).topk(limit.most).indices.tolist()
            allowed = [expert for expert in range(12) if expert // groups.shape[1] in best]
        chosen = sorted(allowed, key=lambda expert: -float(ranking[expert]))[:3]
        weights = scores[chosen] / (scores[chosen].sum() if settings["normalize"] else 1.0) * settings["scale"]
        assert routing.experts[row].tolist() == chosen
        assert (routing.weights[row] - weights).abs().max() < 1e-5
        alone = route_scored(LOGITS[row : row + 1], 3, **settings)
        assert torch.equal(alone.weights[0], routing.weights[row])
        assert torch.equal(alone.experts[0], routing.experts[row])


def test_ties_between_groups_go_to_the_lower_number() -> None:
    settings: dict[str, Any] = {"scoring": "sigmoid", "bias": None, "normalize": True, "scale": 1.0}
    for rows in (1, 5):
        routing = route_scored(torch.zeros(rows, 64), 5, limit=GroupLimit(8, 2, 2), **settings)
        assert routing.experts.tolist() == [[0, 1, 2, 3, 4]] * rows
