"""The ops of the layers, made of one-op-at-a-time kernel sets: `kernels.reference` and `kernels.tiled`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from engine.model_config import Activation
from kernels import int8
from kernels.grouped import GroupedMatrix
from kernels.int8 import Quantization
from kernels.kv_cells import Cells
from kernels.lora import Lora, add_to_embedding
from kernels.paged import AttentionPlan, PagedBatch, plan_attention
from kernels.products import Product, one_by_one
from kernels.routing import combine, route


class KernelSet(Protocol):
    """One implementation of every op; shapes and formulas are in `kernels/reference.py`. Modules satisfy it."""

    @property
    def NAME(self) -> str: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def logits(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def lora(self, y: Tensor, x: Tensor, change: Lora) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]: ...
    def rope_tables(self, positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]: ...
    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...
    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...
    def soft_cap(self, x: Tensor, cap: float) -> Tensor: ...
    def embedding(self, ids: Tensor, weight: Tensor, scale: float | None = None) -> Tensor: ...
    def write_kv(self, k: Tensor, v: Tensor, k_cache: Cells, v_cache: Cells, batch: PagedBatch) -> None: ...
    def copy_blocks(self, blocks: Tensor, copies: Sequence[tuple[int, int]]) -> None: ...
    def paged_attention(
        self,
        q: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        plan: AttentionPlan,
        *,
        scale: float,
        cap: float | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """Matrices over the same input, as they are stored; no biases or one for each.

    For w8a8, `integers` are the numbers and scales of each; `matrices` then what they stand for.
    """

    matrices: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    integers: tuple[tuple[Tensor, Tensor], ...] = ()
    order: Tensor | None = None
    """Of a weight that takes some columns of a wider input: which. Its matrix is as wide, with zeros for the others."""

    @property
    def nbytes(self) -> int:
        """Of what a product reads."""
        parts = chain.from_iterable(self.integers) if self.integers else self.matrices
        return sum(part.nbytes for part in (*parts, *self.biases))


class PlainKernels:
    """The layers' ops on a plain kernel set. Fusing changes no rounding: each op's result is rounded as if alone.

    Quantized weights are kept as what they stand for, in the compute dtype: int8's results without its speed or size.
    """

    def __init__(self, ops: KernelSet, quantization: Quantization | None = None) -> None:
        self.NAME = ops.NAME
        self.quantization = quantization
        self.device = torch.device("cpu")
        self.isa = torch.backends.cpu.get_cpu_capability().lower()
        self._ops = ops
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.rope_tables = ops.rope_tables
        self.soft_cap = ops.soft_cap
        self.router_logits = ops.logits  # of a stored matrix, never quantized
        self.paged_attention = ops.paged_attention
        self.plan_attention = plan_attention
        self.combine = combine
        self.route = route

    def pack(self, *weights: Tensor, biases: Sequence[Tensor] = (), gated: bool = False) -> PlainWeight:
        """Only kept together, nothing is copied; or quantized, with a ValueError for what has no int8 form."""
        if self.quantization is None:
            return PlainWeight(weights, tuple(biases))
        integers = tuple(int8.quantize_weight(weight) for weight in weights)
        matrices = tuple(int8.dequantize(q, scales).to(weights[0].dtype) for q, scales in integers)
        return PlainWeight(matrices, tuple(biases), integers if self.quantization == "w8a8" else ())

    def pack_groups(
        self, *weights: GroupedMatrix, dtype: torch.dtype, biases: Sequence[Tensor] = (), gated: bool = False
    ) -> PlainWeight:
        """What a checkpoint has quantized, as what it stands for, rounded to `dtype`."""
        order = None if weights[0].num_inputs is None else weights[0].order
        matrices = tuple(weight.dequantized().to(dtype) for weight in weights)
        return PlainWeight(matrices, tuple(biases), order=order)

    def linear(
        self, x: Tensor, weight: PlainWeight, *, residual: Tensor | None = None, lora: Lora | None = None
    ) -> Tensor:
        """y = x Wᵀ + b + residual, the matrices' results side by side. x [M, K] -> [M, N]."""
        parts = self._products(x, weight)
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        y = y if residual is None else y + residual
        if lora is not None:
            self._ops.lora(y, x, lora)
        return y

    def gated_linear(
        self, x: Tensor, weight: PlainWeight, activation: Activation, *, lora: Lora | None = None
    ) -> Tensor:
        """act(x Gᵀ + b) · (x Uᵀ + c). x [M, K] -> [M, N]."""
        gate, up = self._products(x, weight)
        if lora is not None:
            both = torch.cat((gate, up), dim=1)
            self._ops.lora(both, x, lora)
            gate, up = both[:, : gate.shape[1]], both[:, gate.shape[1] :]
        if activation == "silu":
            return self._ops.silu_and_mul(gate, up)
        return self._ops.gelu_tanh_and_mul(gate, up)

    def linear_each(self, products: Sequence[Product], activation: Activation | None = None) -> None:
        """Each product into its place."""
        one_by_one(
            products, lambda x, w: self.linear(x, w) if activation is None else self.gated_linear(x, w, activation)
        )

    def logits(self, x: Tensor, weight: PlainWeight, *, lora: Lora | None = None) -> Tensor:
        """y = x Wᵀ in float32. x [M, K] -> [M, V]."""
        if self.quantization == "w8a8":
            y = int8.linear_w8a8(x, *weight.integers[0])
        else:
            y = self._ops.logits(x, weight.matrices[0])
        if lora is not None:
            self._ops.lora(y, x, lora)
        return y

    def lora(self, y: Tensor, x: Tensor, change: Lora) -> None:
        """y[row] += (x[row] Aᵀ) Bᵀ for rows that have an adapter, in place. x [M, K], y [M, N], maybe in float32."""
        self._ops.lora(y, x, change)

    def embedding(
        self, ids: Tensor, weight: PlainWeight, scale: float | None = None, *, lora: Lora | None = None
    ) -> Tensor:
        """Rows of the matrix, times `scale` rounded to its dtype. ids [T] -> [T, H]."""
        x = self._ops.embedding(ids, weight.matrices[0], scale)
        if lora is not None:
            add_to_embedding(x, ids, lora, scale)
        return x

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
        batch: PagedBatch,
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
        end_q, end_k = heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads
        q, k, v = heads[:, :end_q], heads[:, end_q:end_k], heads[:, end_k:]
        if q_norm is not None and k_norm is not None:
            q = self._ops.rms_norm(q, q_norm, eps, unit_offset=unit_offset)
            k = self._ops.rms_norm(k, k_norm, eps, unit_offset=unit_offset)
        self._ops.write_kv(self._ops.apply_rope(k, cos, sin), v, k_cache, v_cache, batch)
        return self._ops.apply_rope(q, cos, sin)

    def _products(self, x: Tensor, weight: PlainWeight) -> list[Tensor]:
        biases = weight.biases or (None,) * len(weight.matrices)
        if self.quantization == "w8a8":
            products = [int8.linear_w8a8(x, q, scales) for q, scales in weight.integers]
            return [(y if b is None else y + b).to(x.dtype) for y, b in zip(products, biases, strict=True)]
        return [self._ops.linear(x, w, b) for w, b in zip(weight.matrices, biases, strict=True)]
