"""Mixture of experts: which experts a row goes to, which rows an expert gets, and how their results become one.

    p = softmax(router logits)        in float32, over all experts
    y[row] = Σ_j w_j · expert_j(x[row])    over the row's top_k experts; w = p, or p / Σ p over those with `normalize`

Plain torch, the same for all kernel sets, and row-invariant: a row's experts come from its own logits, ties go to the
expert of the lower number, and its results are summed in the order of their probabilities, whatever else is there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one expert. `places` int64 [M]: each one's place in the results [T * top_k, …]."""

    expert: int
    rows: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """experts int64 [T, top_k], the likeliest first; weights float32 [T, top_k]."""

    experts: Tensor
    weights: Tensor

    def groups(self, num_experts: int) -> list[Group]:
        """The experts that have rows, by number; each one's rows are in the batch's order."""
        flat = self.experts.flatten()
        order = flat.argsort(stable=True)
        rows = order // self.experts.shape[1]
        groups, start = [], 0
        for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
            if count:
                groups.append(Group(expert, rows[start : start + count], order[start : start + count]))
            start += count
        return groups

    def combine(self, results: Tensor) -> Tensor:
        """Each row's results, weighted and summed in float32, rounded once. results [T * top_k, H] -> [T, H]."""
        by_row = results.view(*self.experts.shape, -1)
        total = by_row[:, 0].float() * self.weights[:, :1]
        for rank in range(1, self.experts.shape[1]):
            total += by_row[:, rank].float() * self.weights[:, rank : rank + 1]
        return total.to(results.dtype)


def route(logits: Tensor, top_k: int, *, normalize: bool) -> Routing:
    """The `top_k` likeliest experts of each row and their weights. logits float32 [T, num_experts]."""
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    probabilities = powers / powers.sum(-1, keepdim=True)
    # Not topk, which takes any of those that are equal.
    values, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    values, experts = values[:, :top_k].contiguous(), experts[:, :top_k].contiguous()
    if normalize:
        total = values[:, :1].clone()
        for rank in range(1, top_k):
            total += values[:, rank : rank + 1]
        values = values / total
    return Routing(experts, values)
