"""Mixture of experts: which experts a row goes to, which rows an expert gets, and how their results become one.

    p = softmax(router logits)        in float32, over all experts
    y[row] = Σ_j w_j · expert_j(x[row])    over the row's top_k experts; w = p, or p / Σ p over those with `normalize`

Plain torch; the native set has an op of its own (kernels/cpu/routing.py). Row-invariant: a row's experts come from its
own logits, ties go to the expert of the lower number, and its results are summed in the order of their probabilities,
whatever else is there.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Sorted:
    """A batch's rows by expert: `rows` int64 [T * top_k], each one's row in the batch, in its order within an expert.

    `spans` has an expert and where its rows begin and end, for each that has any. `places` int64 [T, top_k]: where a
    row's own are among `rows`.
    """

    rows: Tensor
    spans: tuple[tuple[int, int, int], ...]
    places: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """experts int64 [T, top_k], the likeliest first; weights float32 [T, top_k]."""

    experts: Tensor
    weights: Tensor

    def sort(self, num_experts: int) -> Sorted:
        """By number of expert."""
        flat = self.experts.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        spans, start = [], 0
        for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
            if count:
                spans.append((expert, start, start + count))
            start += count
        return Sorted(order // self.experts.shape[1], tuple(spans), places.view_as(self.experts))


def combine(results: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Each row's results, weighted and summed in float32 in the order of its experts, rounded once.

    results [T * top_k, H] by expert, weights float32 and `places` [T, top_k] -> [T, H].
    """
    by_row = results.index_select(0, places.flatten()).view(*places.shape, -1)
    total = by_row[:, 0].float() * weights[:, :1]
    for rank in range(1, places.shape[1]):
        total += by_row[:, rank].float() * weights[:, rank : rank + 1]
    return total.to(results.dtype)


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Of `num_groups` equal groups of experts a row uses the best `most`; a group's score sums its `best` highest."""

    num_groups: int
    most: int
    best: int

    def of(self, scores: Tensor) -> Tensor:
        """The scores, -inf outside each row's groups. Equal groups go by the lower number. [T, num_experts]."""
        grouped = scores.view(scores.shape[0], self.num_groups, -1)
        highest = grouped.sort(dim=-1, descending=True).values
        of_group = highest[..., 0].clone()
        for rank in range(1, self.best):
            of_group += highest[..., rank]
        groups = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : self.most]
        outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, groups, False)
        return grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a model picks: the `top_k` experts of the highest score + bias, among the row's groups if there is a `limit`.

    `bias` float32 [num_experts] takes part in the choice alone. Weights are the chosen ones' scores, with `normalize`
    divided by their sum, then times `scale`.
    """

    top_k: int
    normalize: bool
    scoring: Scoring = "softmax"
    bias: Tensor | None = None
    limit: GroupLimit | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Routed:
    """What a kernel set's `route` gives."""

    chosen: Routing
    by_expert: Sorted


def route(logits: Tensor, rule: RoutingRule) -> Routed:
    """Where each row goes. logits float32 [T, num_experts]."""
    chosen = choose(logits, rule)
    return Routed(chosen, chosen.sort(logits.shape[1]))


def choose(logits: Tensor, rule: RoutingRule) -> Routing:
    """The experts of each row and their weights. logits float32 [T, num_experts]."""
    scores = _softmax(logits) if rule.scoring == "softmax" else 1.0 / (torch.exp(-logits) + 1.0)
    ranking = scores if rule.bias is None else scores + rule.bias
    ranking = ranking if rule.limit is None else rule.limit.of(ranking)
    # Not topk, which takes any of those that are equal.
    experts = ranking.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k].contiguous()
    values = scores.gather(1, experts)
    if rule.normalize:
        values = values / (_sum_of_ranks(values) + 1e-20)
    return Routing(experts, values * rule.scale)


def _softmax(logits: Tensor) -> Tensor:
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def _sum_of_ranks(values: Tensor) -> Tensor:
    """[T, top_k] -> [T, 1], from the first to the last."""
    total = values[:, :1].clone()
    for rank in range(1, values.shape[1]):
        total += values[:, rank : rank + 1]
    return total
