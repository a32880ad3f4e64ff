"""An MLP of experts: each row goes through the few that the router picks for it, each expert computes all its rows."""

import torch
from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.layers import GatedMlp, StepContext
from engine.model_config import ModelConfig
from engine.moe_config import MoeConfig
from engine.weight_source import Projection, WeightSource
from kernels.products import Product
from kernels.routing import RoutingRule


class ExpertsMlp:
    """x -> the weighted sum of its top_k experts' down(act(gate(x)) · up(x)), plus the residual if there is one.

    DeepSeek's has an MLP besides that all rows go through, and a router in float32 whatever the compute dtype is.
    The router's matrix is never quantized: a step of int8 would send rows to other experts. Adapters leave the experts
    alone.
    """

    def __init__(
        self, kernels: ModelKernels, weights: WeightSource, name: str, config: ModelConfig, moe: MoeConfig
    ) -> None:
        self._kernels = kernels
        self._activation = config.activation
        self._moe = moe
        hidden, ffn = config.hidden_size, moe.intermediate_size
        own, wide = moe.deepseek, None if moe.deepseek is None else torch.float32
        self._router = weights.take(f"{name}.gate.weight", (moe.num_experts, hidden), wide)
        self._rule = RoutingRule(moe.top_k, moe.normalize)
        if own is not None:
            bias: Tensor | None = None
            if own.scoring == "sigmoid":
                bias = weights.take(f"{name}.gate.e_score_correction_bias", (moe.num_experts,), wide)
            self._rule = RoutingRule(moe.top_k, moe.normalize, own.scoring, bias, own.limit, own.scale)
        self._shared: GatedMlp | None = None
        if own is not None and own.shared_size:
            self._shared = GatedMlp(kernels, weights, f"{name}.shared_experts", config, own.shared_size)
        self._experts = []
        for expert in range(moe.num_experts):
            prefix = f"{name}.experts.{expert}"
            both = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
            gate_up = weights.pack(Projection(both, (ffn, ffn), hidden, gated=True, adaptable=False, routed=True))
            last = (f"{prefix}.down_proj",)
            down = weights.pack(Projection(last, (hidden,), ffn, adaptable=False, routed=True))
            self._experts.append((gate_up, down))

    def __call__(self, x: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        moe = self._moe
        routed = self._kernels.route(self._kernels.router_logits(x.to(self._router.dtype), self._router), self._rule)
        by_expert = routed.by_expert
        rows = x.index_select(0, by_expert.rows)
        activated, results = rows.new_empty(len(rows), moe.intermediate_size), torch.empty_like(rows)
        ups, downs = [], []
        for expert, start, end in by_expert.spans:
            gate_up, down = self._experts[expert]
            ups.append(Product(rows[start:end], gate_up, activated[start:end]))
            downs.append(Product(activated[start:end], down, results[start:end]))
        self._kernels.linear_each(ups, self._activation)
        self._kernels.linear_each(downs)
        y = self._kernels.combine(results, routed.chosen.weights, by_expert.places)
        if step.group is not None:
            y = step.group.sum(y.float()).to(x.dtype)
        if self._shared is not None:
            y = y + self._shared(x, step)
        return y if residual is None else torch.add(y, residual)
