"""The Triton kernel set: what the engine's layers ask for, on one device; in the interpreter on CPU tensors.

A step's sequences come as `step_batch.DeviceBatch`. No op waits for the device or reads what lies there, so that all
of them can be captured in a CUDA graph (routing to experts apart, which is not done here).

Weights are [N, K] matrices over one input, one below the other, so that q, k and v are one product. Attention takes
sequences with few new tokens through `decode_attention`, chunks through `prefill_attention`, in one batch if need be;
both give a token the same bits. What is left to torch is elementwise or a gather, and so row-invariant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import reference, tiled
from kernels.grouped import GroupedMatrix
from kernels.kv_cells import Cells, QuantizedCells
from kernels.lora import Lora
from kernels.products import Product, one_by_one
from kernels.routing import Routed, RoutingRule, combine, route
from kernels.triton import gated_activation, kv_write, rms_norm
from kernels.triton.decode_attention import decode_attention
from kernels.triton.device import device_arch
from kernels.triton.fp8 import CACHE_DTYPE
from kernels.triton.linear import linear
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.step_batch import DeviceBatch


@dataclass(frozen=True, slots=True)
class TritonWeight:
    """Matrices over one input below each other: matrix [N, K], bias [N] or none."""

    matrix: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Attention of all layers with one window."""

    batch: DeviceBatch
    window: int | None


class TritonKernels:
    """The kernel set on `device`."""

    NAME = "triton"
    quantization = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.isa = f"sm_{device_arch(device)}" if device.type == "cuda" else "interpreter"
        self._frequencies: dict[int, tuple[Tensor, Tensor]] = {}
        self.rms_norm = rms_norm.rms_norm
        self.add_rms_norm = rms_norm.add_rms_norm
        self.soft_cap = tiled.soft_cap

    def pack(self, *weights: Tensor, biases: Sequence[Tensor] = (), gated: bool = False) -> TritonWeight:
        """Copies them to the device, one below the other; a gated pair has the gate first."""
        matrix = torch.cat([weight.to(self.device) for weight in weights])
        return TritonWeight(matrix, torch.cat([bias.to(self.device) for bias in biases]) if biases else None)

    def pack_groups(
        self, *weights: GroupedMatrix, dtype: torch.dtype, biases: Sequence[Tensor] = (), gated: bool = False
    ) -> TritonWeight:
        """What a checkpoint has quantized, as what it stands for, rounded to `dtype`."""
        return self.pack(*(weight.dequantized().to(dtype) for weight in weights), biases=biases, gated=gated)

    def linear(
        self, x: Tensor, weight: TritonWeight, *, residual: Tensor | None = None, lora: Lora | None = None
    ) -> Tensor:
        """y = x Wᵀ + b + residual, the matrices' results side by side. x [M, K] -> [M, N]."""
        _refuse(lora)
        return linear(x, weight.matrix, weight.bias, residual=residual)

    def gated_linear(
        self, x: Tensor, weight: TritonWeight, activation: Literal["silu", "gelu_tanh"], *, lora: Lora | None = None
    ) -> Tensor:
        """act(x Gᵀ + b) · (x Uᵀ + c). x [M, K] -> [M, N]."""
        _refuse(lora)
        gate, up = linear(x, weight.matrix, weight.bias).chunk(2, dim=1)
        activate = gated_activation.silu_and_mul if activation == "silu" else gated_activation.gelu_tanh_and_mul
        return activate(gate, up)

    def linear_each(self, products: Sequence[Product], activation: Literal["silu", "gelu_tanh"] | None = None) -> None:
        """Each product into its place."""
        one_by_one(
            products, lambda x, w: self.linear(x, w) if activation is None else self.gated_linear(x, w, activation)
        )

    def combine(self, results: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """See `kernels.routing`."""
        return combine(results, weights, places)

    def route(self, logits: Tensor, rule: RoutingRule) -> Routed:
        """See `kernels.routing`."""
        return route(logits, rule)

    def logits(self, x: Tensor, weight: TritonWeight, *, lora: Lora | None = None) -> Tensor:
        """y = x Wᵀ in float32. x [M, K] -> [M, V]."""
        _refuse(lora)
        return linear(x, weight.matrix, out_dtype=torch.float32)

    def lora(self, y: Tensor, x: Tensor, change: Lora) -> None:
        """Refused."""
        _refuse(change)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """`logits` of a plain matrix. x [M, K], W [E, K] -> [M, E]."""
        return linear(x, weight, out_dtype=torch.float32)

    def embedding(
        self, ids: Tensor, weight: TritonWeight, scale: float | None = None, *, lora: Lora | None = None
    ) -> Tensor:
        """Rows of the matrix, times `scale` rounded to its dtype. ids [T] -> [T, H]."""
        _refuse(lora)
        return reference.embedding(ids, weight.matrix, scale)

    def rope_tables(self, positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """(cos, sin) of position · inv_freq, times `scaling`. positions [T], inv_freq [D / 2] -> float32 [T, D / 2]."""
        kept = self._frequencies.get(id(inv_freq))
        if kept is None:
            kept = self._frequencies[id(inv_freq)] = (inv_freq, inv_freq.to(self.device))
        return tiled.rope_tables(positions, kept[1], scaling)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y. [M, N] each."""
        return x + y

    def columns(self, x: Tensor, order: Tensor) -> Tensor:
        """Columns of x [M, K] in another order, or some of them."""
        return x.index_select(1, order)

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        batch: DeviceBatch,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        unit_offset: bool = False,
    ) -> Tensor:
        """Norm q's and k's heads if there are weights, rotate both, store k and v in the step's slots. -> q [T, Hq, D].

        qkv [T, (Hq + 2 Hkv) D], rows of q, k and v side by side.
        """
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q = rms_norm.rms_norm(q, q_norm, eps, unit_offset=unit_offset)
            k = rms_norm.rms_norm(k, k_norm, eps, unit_offset=unit_offset)
        caches, scales = _caches(k_cache, v_cache)
        return kv_write.rope_and_write_kv(q, k, v, cos, sin, *caches, batch.slots, **scales)

    def plan_attention(self, batch: DeviceBatch, *, group_size: int, window: int | None) -> TritonPlan:
        """The plan of all layers with one window. A token sees the `window` latest positions, its own included."""
        return TritonPlan(batch, window)

    def paged_attention(
        self, q: Tensor, k_cache: Cells, v_cache: Cells, plan: TritonPlan, *, scale: float, cap: float | None = None
    ) -> Tensor:
        """softmax(q Kᵀ · scale, capped) V for each token over its visible positions. q [T, Hq, D] -> [T, Hq, D]."""
        caches, scales = _caches(k_cache, v_cache)
        out = torch.empty_like(q)
        step = plan.batch
        if step.short is not None:
            decode_attention(
                q,
                *caches,
                **scales,
                cu_seqlens=step.short.cu_seqlens,
                query_starts=step.short.query_starts,
                kv_lens=step.short.kv_lens,
                block_tables=step.short.block_tables,
                num_tokens=step.short.num_tokens,
                max_kv_len=step.short.max_kv_len,
                scale=scale,
                window=plan.window,
                cap=cap,
                out=out,
            )
        if step.long is not None and step.tiles is not None:
            prefill_attention(
                q,
                *caches,
                **scales,
                cu_seqlens=step.long.cu_seqlens,
                query_starts=step.long.query_starts,
                kv_lens=step.long.kv_lens,
                block_tables=step.long.block_tables,
                tiles=step.tiles,
                scale=scale,
                window=plan.window,
                cap=cap,
                out=out,
            )
        return out


def _caches(k_cache: Cells, v_cache: Cells) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """K and V as the kernels take them, and scales of an e4m3 cache."""
    if isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor):
        return (k_cache, v_cache), {}
    if not (isinstance(k_cache, QuantizedCells) and isinstance(v_cache, QuantizedCells) and k_cache.kind == "fp8_e4m3"):
        raise ValueError("of quantized caches the triton kernels have e4m3 alone")
    values = k_cache.values.view(CACHE_DTYPE), v_cache.values.view(CACHE_DTYPE)
    return values, {"k_scale": k_cache.scales, "v_scale": v_cache.scales}


def _refuse(lora: Lora | None) -> None:
    if lora is not None:
        raise ValueError("the triton kernels serve no adapters")
