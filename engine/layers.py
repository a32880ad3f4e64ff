"""The building blocks of the models: weights plus a kernel set. Activations are [tokens, ...], never padded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.lora.step import LoraStep
from engine.memory import KvLayers
from engine.model_config import ModelConfig
from engine.parallel.group import RankGroup, side_by_side
from engine.rope import RopeConfig, inverse_frequencies, rotary_order
from engine.weight_source import Projection, WeightSource
from kernels.lora import Lora
from kernels.paged import StepBatch


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share: the batch, the rotary tables, the attention plans by (KV group, window)."""

    batch: StepBatch
    memory: KvLayers
    tables: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    plans: Mapping[tuple[int, int | None], Any]
    adapters: LoraStep | None = None
    group: RankGroup | None = None
    """The ranks that share the model out; None: there is one."""

    def lora(self, names: tuple[str, ...]) -> Lora | None:
        """What the batch's adapters add to the projection made of these matrices; None if nothing."""
        return None if self.adapters is None else self.adapters.of(names)

    @staticmethod
    def build(
        config: ModelConfig,
        kernels: ModelKernels,
        batch: StepBatch,
        positions: Tensor,
        memory: KvLayers,
        adapters: LoraStep | None = None,
        group: RankGroup | None = None,
    ) -> "StepContext":
        tables = {}
        for rope in dict.fromkeys(config.layer_ropes):
            inv_freq, scaling = inverse_frequencies(rope, config.rope_dim)
            cos, sin = kernels.rope_tables(positions, inv_freq, scaling)
            still = config.rope_dim // 2 - cos.shape[1]  # pairs that don't turn
            tables[rope] = (F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))) if still else (cos, sin)
        plans = {
            (group, window): kernels.plan_attention(batch.of_group(group), group_size=config.group_size, window=window)
            for group, window in dict.fromkeys(zip(memory.layer_groups, config.layer_windows, strict=True))
        }
        return StepContext(batch, memory, tables, plans, adapters, group)


class RmsNorm:
    """Root-mean-square norm over the last dimension, of x or of x + residual."""

    def __init__(self, kernels: ModelKernels, weights: WeightSource, name: str, size: int, config: ModelConfig) -> None:
        self._kernels = kernels
        self._eps = config.norm_eps
        self._unit_offset = config.norm_unit_offset
        self.weight = weights.take(f"{name}.weight", (size,))

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps, unit_offset=self._unit_offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self._eps, unit_offset=self._unit_offset)


class RowLinear:
    """A projection of which each rank has the columns that its own part of the input meets: the products are added up.

    With one rank it is a plain projection. Where a checkpoint's groups are of columns that lie apart (act-order), a
    rank has groups instead, so it takes the whole input, which the ranks first put together.
    """

    def __init__(
        self, kernels: ModelKernels, weights: WeightSource, projection: Projection, config: ModelConfig
    ) -> None:
        self._kernels = kernels
        self._names = projection.names
        self._bias: Tensor | None = None
        if config.shard is not None and projection.bias:
            self._bias = weights.take(f"{projection.names[0]}.bias", projection.num_outs)
            projection = replace(projection, bias=False)
        self.weight = weights.pack(projection)
        self._takes_all = config.shard is not None and getattr(self.weight, "order", None) is not None

    def __call__(self, x: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b + residual; over ranks it is summed in float32 and rounded once."""
        lora = step.lora(self._names)
        if step.group is None:
            return self._kernels.linear(x, self.weight, residual=residual, lora=lora)
        part = self._kernels.logits(side_by_side(x, step.group) if self._takes_all else x, self.weight)
        if lora is not None:
            self._kernels.lora(part, x, lora)
        y = step.group.sum(part)
        for more in (self._bias, residual):
            y = y if more is None else y + more
        return y.to(x.dtype)


class GatedMlp:
    """down(act(gate(x)) · up(x)), plus the residual if there is one."""

    def __init__(
        self, kernels: ModelKernels, weights: WeightSource, name: str, config: ModelConfig, size: int | None = None
    ) -> None:
        """`size`: of its own, if not the model's intermediate_size."""
        hidden, ffn, bias = config.hidden_size, size or config.intermediate_size, config.mlp_bias
        self._kernels = kernels
        self._activation = config.activation
        self._gate_up_names = (f"{name}.gate_proj", f"{name}.up_proj")
        fused = f"{name}.gate_up_proj" if config.fused_projections else None
        gate_up = Projection(self._gate_up_names, (ffn, ffn), hidden, bias=bias, gated=True, fused=fused)
        self.gate_up = weights.pack(gate_up)
        self.down = RowLinear(kernels, weights, Projection((f"{name}.down_proj",), (hidden,), ffn, bias=bias), config)

    def __call__(self, x: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        lora = step.lora(self._gate_up_names)
        activated = self._kernels.gated_linear(x, self.gate_up, self._activation, lora=lora)
        return self.down(activated, step, residual)


class Attention:
    """Causal self-attention over the paged cache: project, norm q and k if the family does, rotate, store, attend."""

    def __init__(
        self, kernels: ModelKernels, weights: WeightSource, name: str, layer: int, config: ModelConfig
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._layer = layer
        self._rope = config.layer_ropes[layer]
        self._window = config.layer_windows[layer]
        hidden, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self._qkv_names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        fused = f"{name}.qkv_proj" if config.fused_projections else None
        sizes = (q_size, kv_size, kv_size)
        self.qkv = weights.pack(Projection(self._qkv_names, sizes, hidden, bias=config.qkv_bias, fused=fused))
        self._order = None
        if self._rope.rotary_dim is not None:
            turned = rotary_order(config.num_heads + config.num_kv_heads, head_dim, self._rope.rotary_dim)
            self._order = torch.cat((turned, torch.arange(q_size + kv_size, q_size + 2 * kv_size))).to(kernels.device)
        output = Projection((f"{name}.o_proj",), (hidden,), q_size, bias=config.output_bias)
        self.o = RowLinear(kernels, weights, output, config)
        self.q_norm = weights.take(f"{name}.q_norm.weight", (head_dim,)) if config.qk_norm else None
        self.k_norm = weights.take(f"{name}.k_norm.weight", (head_dim,)) if config.qk_norm else None

    def __call__(self, x: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        """The output projection's result, plus the residual if there is one."""
        config = self._config
        cos, sin = step.tables[self._rope]
        k_cache, v_cache = step.memory.layer(self._layer)
        group = step.memory.layer_groups[self._layer]
        qkv = self._kernels.linear(x, self.qkv, lora=step.lora(self._qkv_names))
        q = self._kernels.rope_and_store(
            qkv if self._order is None else self._kernels.columns(qkv, self._order),
            cos,
            sin,
            k_cache,
            v_cache,
            step.batch.of_group(group),
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=config.norm_eps,
            unit_offset=config.norm_unit_offset,
        )
        plan = step.plans[group, self._window]
        out = self._kernels.paged_attention(
            q, k_cache, v_cache, plan, scale=config.attention_scale, cap=config.attention_cap
        )
        return self.o(out.view(x.shape[0], -1), step, residual)
