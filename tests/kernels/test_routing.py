"""Routing to experts: against float64, what ties do, and rows that don't see each other."""

from collections.abc import Sequence

import pytest
import torch

from kernels.routing import GroupLimit, RoutingRule, choose, combine

LOGITS = torch.randn(41, 12, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("normalize", [True, False])
def test_the_likeliest_experts_and_their_weights(normalize: bool) -> None:
    routing = choose(LOGITS, RoutingRule(3, normalize))
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
        assert choose(logits[:rows], RoutingRule(5, True)).experts.tolist() == [[9, 40, 63, 0, 1]] * rows


def test_a_span_is_an_experts_rows_in_order() -> None:
    routing = choose(LOGITS, RoutingRule(2, True))
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
    routing = choose(LOGITS, RoutingRule(3, False))
    places = routing.sort(12).places
    results = torch.randn(41 * 3, 20, generator=torch.Generator().manual_seed(4))
    expected = (results[places].double() * routing.weights.double()[..., None]).sum(1)
    assert (combine(results, routing.weights, places) - expected).abs().max() < 1e-6


def test_a_row_depends_on_itself_alone() -> None:
    results = torch.randn(41 * 3, 20, generator=torch.Generator().manual_seed(4)).bfloat16()
    routing = choose(LOGITS, RoutingRule(3, True))
    in_order = torch.arange(41 * 3).view(41, 3)
    combined = combine(results, routing.weights, in_order)
    for row in range(41):
        alone = choose(LOGITS[row : row + 1], RoutingRule(3, True))
        assert torch.equal(alone.experts[0], routing.experts[row])
        assert torch.equal(alone.weights[0], routing.weights[row])
        own = combine(results[3 * row : 3 * row + 3], alone.weights, in_order[:1])
        assert torch.equal(own[0], combined[row])


RULES = [
    RoutingRule(3, False),
    RoutingRule(3, False, limit=GroupLimit(4, 2, 1), scale=16.0),
    RoutingRule(3, True, "sigmoid", torch.linspace(-0.3, 0.3, 12).view(4, 3).t().flatten(), GroupLimit(3, 2, 2), 2.5),
]


@pytest.mark.parametrize("rule", RULES)
def test_scores_within_groups(rule: RoutingRule) -> None:
    """Against plain loops in float64, and each row alone."""
    routing = choose(LOGITS, rule)
    for row, logits in enumerate(LOGITS):
        wide = logits.double()
        scores = wide.softmax(-1) if rule.scoring == "softmax" else wide.sigmoid()
        ranking = scores if rule.bias is None else scores + rule.bias.double()
        allowed: Sequence[int] = range(12)
        if limit := rule.limit:
            groups = ranking.view(limit.num_groups, -1)
            best = groups.topk(limit.best).values.sum(-1).topk(limit.most).indices.tolist()
            allowed = [expert for expert in range(12) if expert // groups.shape[1] in best]
        chosen = sorted(allowed, key=lambda expert: -float(ranking[expert]))[:3]
        weights = scores[chosen] / (scores[chosen].sum() if rule.normalize else 1.0) * rule.scale
        assert routing.experts[row].tolist() == chosen
        assert (routing.weights[row] - weights).abs().max() < 1e-5
        alone = choose(LOGITS[row : row + 1], rule)
        assert torch.equal(alone.weights[0], routing.weights[row])
        assert torch.equal(alone.experts[0], routing.experts[row])


def test_ties_between_groups_go_to_the_lower_number() -> None:
    rule = RoutingRule(5, True, "sigmoid", limit=GroupLimit(8, 2, 2))
    for rows in (1, 5):
        routing = choose(torch.zeros(rows, 64), rule)
        assert routing.experts.tolist() == [[0, 1, 2, 3, 4]] * rows
