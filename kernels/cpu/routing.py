"""A mixture's routing on the native kernels: experts, weights and the rows by expert in one call."""

from typing import Any

import torch
from torch import Tensor

from kernels.routing import Routed, Routing, RoutingRule, Sorted


def route(ops: Any, logits: Tensor, rule: RoutingRule) -> Routed:
    """`kernels.routing.route`, up to the rounding of a score: what is equal or not a number is ordered alike.

    logits float32 [T, num_experts]. Raises ValueError for what doesn't fit the rule.
    """
    num_rows, num_experts = logits.shape
    bias, limit = rule.bias, rule.limit
    if logits.dtype != torch.float32 or not 1 <= rule.top_k <= num_experts:
        raise ValueError(f"{logits.dtype} logits of {num_experts} experts, {rule.top_k} of which a row should have")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_experts,)):
        raise ValueError(f"a bias of {bias.dtype} {tuple(bias.shape)} for {num_experts} experts")
    groups = (0, 0, 0) if limit is None else (limit.num_groups, limit.most, limit.best)
    if limit is not None and (
        num_experts % limit.num_groups
        or not 1 <= limit.best <= num_experts // limit.num_groups
        or not 1 <= limit.most <= limit.num_groups
    ):
        raise ValueError(f"{limit} of {num_experts} experts")
    logits, bias = logits.contiguous(), None if bias is None else bias.contiguous()
    experts, places = torch.empty(2, num_rows, rule.top_k, dtype=torch.int64)
    rows = torch.empty(num_rows * rule.top_k, dtype=torch.int64)
    weights = torch.empty(num_rows, rule.top_k)
    spans = ops.route(
        *(logits.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(experts.data_ptr(), weights.data_ptr(), rows.data_ptr(), places.data_ptr()),
        *(num_rows, num_experts, rule.top_k, *groups),
        *(rule.scoring == "sigmoid", rule.normalize, rule.scale),
    )
    return Routed(Routing(experts, weights), Sorted(rows, tuple(spans), places))
