"""An MLP of experts: each row goes through the few that the router picks for it, each expert computes all its rows."""

import torch
from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.layers import StepContext
from engine.model_config import ModelConfig
from engine.moe_config import MoeConfig
from engine.weight_source import Projection, WeightSource
from kernels.routing import route


class ExpertsMlp:
    """x -> the weighted sum of its top_k experts' down(act(gate(x)) · up(x)), plus the residual if there is one.

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
        self._router = weights.take(f"{name}.gate.weight", (moe.num_experts, hidden))
        self._experts = []
        for expert in range(moe.num_experts):
            prefix = f"{name}.experts.{expert}"
            both = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
            gate_up = weights.pack(Projection(both, (ffn, ffn), hidden, gated=True, adaptable=False))
            down = weights.pack(Projection((f"{prefix}.down_proj",), (hidden,), ffn, adaptable=False))
            self._experts.append((gate_up, down))

    def __call__(self, x: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        moe = self._moe
        routing = route(self._kernels.router_logits(x, self._router), moe.top_k, normalize=moe.normalize)
        results = x.new_empty(x.shape[0] * moe.top_k, x.shape[1])
        for group in routing.groups(moe.num_experts):
            gate_up, down = self._experts[group.expert]
            activated = self._kernels.gated_linear(x[group.rows], gate_up, self._activation)
            results[group.places] = self._kernels.linear(activated, down)
        y = routing.combine(results)
        if step.group is not None:
            y = step.group.sum(y.float()).to(x.dtype)
        return y if residual is None else torch.add(y, residual)
