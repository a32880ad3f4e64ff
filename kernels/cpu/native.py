"""The native kernel set for float32 and bfloat16 on the CPU: C++ in kernels/cpu/src, one op a file.

Row-invariant by construction: an output element is one chain of fused multiply-adds over ascending k, attention reduces
splits of 256 tokens in order (see ops/tiles.h, ops/attention.h), and no order depends on the number of rows or threads.
Inside an op everything is float32 and the result is rounded once; bfloat16 attention also rounds its weights.

Beside the ops of every kernel set it has fused ones, which take weights packed ahead: `gated_linear`, `rope_and_store`,
and `linear` with a residual. A plain weight is packed on first use and kept beside the original as long as that lives.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import reference, tiled
from kernels.cpu import draws, packed, routing
from kernels.cpu.arguments import code
from kernels.cpu.attention import NativePlan, attend, rope_and_store
from kernels.cpu.draws import Draw, Drawn
from kernels.cpu.embedding import embed
from kernels.cpu.extension import Extension
from kernels.cpu.looks import Look, Looks, Seen
from kernels.cpu.lora import activate_strips, add_lora, as_strips
from kernels.cpu.packed import PackedWeight
from kernels.cpu.packed_groups import PackedGroups
from kernels.cpu.packed_parts import PackedParts, pack_alike
from kernels.cpu.products import NativeWeight, columns_of, go_together, product, products_together
from kernels.cpu.recording import RecordedStep, record
from kernels.cpu.rope_rows import RopeRows
from kernels.cpu.spaced_rows import spaced_rows
from kernels.grouped import GroupedMatrix
from kernels.int8 import Quantization
from kernels.kv_cells import Cells
from kernels.lora import Lora, add_to_embedding
from kernels.paged import AttentionPlan, PagedBatch, indices
from kernels.products import Product, one_by_one
from kernels.routing import Routed, RoutingRule

_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}


class NativeKernels:
    """The kernel set on one extension. `quantization`: of every weight that it packs (kernels/int8.py)."""

    NAME = "native"
    device = torch.device("cpu")

    def __init__(self, extension: Extension, quantization: Quantization | None = None) -> None:
        self.isa = extension.isa
        self.quantization = quantization
        self._ops = extension.module
        self._packed: dict[int, tuple[weakref.ref[Tensor], PackedWeight]] = {}
        self._lengths: tuple[Sequence[int], Sequence[int], Tensor, Tensor] | None = None
        self._rope_rows: dict[tuple[int, float], tuple[weakref.ref[Tensor], RopeRows]] = {}

    def pack(
        self, *weights: Tensor, biases: Sequence[Tensor] = (), gated: bool = False, out: Tensor | None = None
    ) -> PackedWeight:
        """Weights in tile order; see `packed.pack`."""
        return packed.pack(self._ops, weights, biases, gated=gated, int8=self.quantization is not None, out=out)

    def pack_groups(
        self, *weights: GroupedMatrix, dtype: torch.dtype, biases: Sequence[Tensor] = (), gated: bool = False
    ) -> PackedGroups | PackedParts:
        """What a checkpoint has quantized, in tile order, for input of `dtype`; see `packed_parts.pack_alike`."""
        return pack_alike(self._ops, weights, dtype, biases, gated=gated)

    def linear(
        self,
        x: Tensor,
        weight: Tensor | NativeWeight,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        lora: Lora | None = None,
    ) -> Tensor:
        """y = x Wᵀ + b + residual, plus what adapters add. x [M, K], W [N, K], residual [M, N] -> [M, N].

        A packed weight has its bias.
        """
        y = self._linear(x, self._pack_once(weight, bias), residual, 0, x.dtype)
        if lora is not None:
            self.lora(y, x, lora)
        return y

    def gated_linear(
        self,
        x: Tensor,
        weight: PackedWeight | PackedGroups,
        activation: Literal["silu", "gelu_tanh"],
        *,
        lora: Lora | None = None,
    ) -> Tensor:
        """act(x Gᵀ + b) · (x Uᵀ + c) for a packed gate and up projection. x [M, K] -> [M, N].

        With adapters the sums stay in float32 until they are all there: rows without one get the same bits as else.
        """
        if lora is None:
            return self._linear(x, weight, None, _ACTIVATIONS[activation], x.dtype)
        both = self._linear(x, as_strips(weight), None, 0, torch.float32)
        add_lora(self._ops, both, x, lora, strips=True)
        return activate_strips(self._ops, both, weight.num_out, _ACTIVATIONS[activation], x.dtype)

    def linear_each(self, products: Sequence[Product], activation: Literal["silu", "gelu_tanh"] | None = None) -> None:
        """Each product into its place; plain weights' all in one call, to the bits of a call of its own each."""
        number = 0 if activation is None else _ACTIVATIONS[activation]
        if go_together(products, gated=activation is not None):
            products_together(self._ops, products, number)
        else:
            one_by_one(products, lambda x, weight: self._linear(x, weight, None, number, x.dtype))

    def combine(self, results: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """`kernels.routing.combine`, to the bit. results [T * top_k, H], weights and places [T, top_k] -> [T, H]."""
        results, weights, places = results.contiguous(), weights.contiguous(), places.contiguous()
        out = torch.empty(places.shape[0], results.shape[1], dtype=results.dtype)
        self._ops.combine(
            *(code(results), results.data_ptr(), weights.data_ptr(), places.data_ptr(), out.data_ptr()),
            *(*places.shape, results.shape[1]),
        )
        return out

    def route(self, logits: Tensor, rule: RoutingRule) -> Routed:
        """Where each row goes. logits float32 [T, num_experts]; see `kernels.cpu.routing`."""
        return routing.route(self._ops, logits, rule)

    def logits(self, x: Tensor, weight: Tensor | NativeWeight, *, lora: Lora | None = None) -> Tensor:
        """y = x Wᵀ in float32, not rounded before. x [M, K], W [V, K] -> [M, V]."""
        y = self._linear(x, self._pack_once(weight, None), None, 0, torch.float32)
        if lora is not None:
            self.lora(y, x, lora)
        return y

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """`logits` of a plain weight that is not quantized whatever the others are. x [M, K], W [E, K] -> [M, E]."""
        return self._linear(x, self._pack_once(weight, None, plain=True), None, 0, torch.float32)

    def lora(self, y: Tensor, x: Tensor, change: Lora) -> None:
        """y[row] += (x[row] Aᵀ) Bᵀ for the rows that have an adapter, in float32 and in place.

        x [M, K], y [M, N] of x's dtype or float32.
        """
        add_lora(self._ops, y, x, change)

    def draw(self, each: Sequence[Draw]) -> list[Drawn]:
        """Who may win each draw from a row of logits; see `draws.run`."""
        return draws.run(self._ops, each)

    def look(self, logits: NDArray[np.float32], num_columns: int, looks: Sequence[Look]) -> list[Seen]:
        """What `looks` ask about the first `num_columns` of each row of logits [R, V]."""
        return Looks(looks).run(self._ops, logits, num_columns)

    def logits_looked_at(
        self, x: Tensor, weight: Tensor | NativeWeight, num_columns: int, looks: Sequence[Look], whole: Sequence[int]
    ) -> tuple[Tensor, list[Seen]]:
        """`logits`, of which only the rows `whole` are written, and what the looks see of any, to the bits of `look`.

        x [M, K], W [V, K] -> [M, V]. The other rows take no memory unless somebody touches them.
        """
        made = self._pack_once(weight, None)
        if isinstance(made, PackedParts):
            raise ValueError("an output matrix is packed as one")
        table, rows = Looks(looks), np.asarray(whole, dtype=np.int64)
        panel_bytes = made.data.nbytes // -(-made.num_out // packed.PANEL_ROWS)
        questions = self._ops.Questions(
            table.address, len(table), rows.ctypes.data, len(rows), num_columns, panel_bytes
        )
        y = self._linear(x, made, None, 0, torch.float32, questions.address)
        return y, table.seen()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
        """y = x / sqrt(mean(x²) + eps) · w, or · (1 + w) with `unit_offset`, over the last dimension."""
        size = x.shape[-1]
        rows = x if x.dim() == 2 else x.reshape(-1, size)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = spaced_rows(rows.shape[0], size, x.dtype)
        self._ops.rms_norm(
            *(code(rows), rows.data_ptr(), rows.stride(0), 0, weight.data_ptr(), out.data_ptr(), out.stride(0), 0),
            *(rows.shape[0], size, eps, unit_offset),
        )
        return out if x.dim() == 2 else out.reshape(x.shape)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        residual, size = residual.contiguous(), x.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()
        total = torch.empty_like(residual)
        out = spaced_rows(x.shape[0], size, x.dtype) if x.dim() == 2 else torch.empty_like(residual)
        self._ops.rms_norm(
            *(code(rows), rows.data_ptr(), rows.stride(-2), residual.data_ptr(), weight.data_ptr()),
            *(out.data_ptr(), out.stride(-2), total.data_ptr(), rows.numel() // size, size, eps, unit_offset),
        )
        return out, total

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y. [M, N] each."""
        x, y = (each if each.stride(1) == 1 else each.contiguous() for each in (x, y))
        out = torch.empty(x.shape, dtype=x.dtype)
        self._ops.add(code(x), x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), out.data_ptr(), *x.shape)
        return out

    def columns(self, x: Tensor, order: Tensor) -> Tensor:
        """x's columns in another order, or some of them. x [M, K], order int64 [N] of numbers below K -> [M, N]."""
        return columns_of(self._ops, x, order)

    def rope_tables(self, positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """(cos, sin) of position · inv_freq, times `scaling`. positions [T], inv_freq [D / 2] -> float32 [T, D / 2]."""
        key = (id(inv_freq), scaling)
        kept = self._rope_rows.get(key)
        if kept is None or kept[0]() is not inv_freq:
            forget = weakref.ref(inv_freq, lambda _: self._rope_rows.pop(key, None))
            kept = self._rope_rows[key] = (forget, RopeRows(inv_freq.clone(), scaling))
        return kept[1].of(positions)

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the pairs (x[i], x[i + D / 2]). x [T, H, D], cos and sin [T, D / 2] -> [T, H, D]."""
        rows = x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._ops.rope(
            *(code(x), rows.data_ptr(), rows.stride(0), 0, 0, out.data_ptr(), out.stride(0), 0, 0),
            *(cos.data_ptr(), sin.data_ptr(), x.shape[0], x.shape[1], 0, x.shape[2]),
        )
        return out

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

        qkv [T, (Hq + 2 Hkv) D], rows of q, k and v side by side; overwritten: the result is a view of it.
        """
        norms = (q_norm, k_norm, eps, unit_offset)
        return rope_and_store(self._ops, qkv, cos, sin, k_cache, v_cache, batch, norms)

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate · sigmoid(gate) · up."""
        return self._gated(gate, up, 1)

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) · up with gelu(x) = x / 2 · (1 + tanh(sqrt(2 / pi) · (x + 0.044715 x³)))."""
        return self._gated(gate, up, 2)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap · tanh(x / cap)."""
        return tiled.soft_cap(x, cap)

    def embedding(
        self, ids: Tensor, weight: Tensor | NativeWeight, scale: float | None = None, *, lora: Lora | None = None
    ) -> Tensor:
        """Rows of `weight`, times `scale` rounded to its dtype. ids [T] -> [T, H]. Raises IndexError."""
        x = embed(self._ops, ids, weight, scale)
        if lora is not None:
            add_to_embedding(x, ids, lora, scale)
        return x

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Cells, v_cache: Cells, batch: PagedBatch) -> None:
        """Store the step's keys and values [T, Hkv, D] in their slots."""
        reference.write_kv(k, v, k_cache, v_cache, batch)

    def copy_blocks(self, blocks: Tensor, copies: Sequence[tuple[int, int]]) -> None:
        """blocks[dst] = blocks[src] for each (src, dst), in order. blocks [num_blocks, ...]."""
        reference.copy_blocks(blocks, copies)

    def plan_attention(self, batch: PagedBatch, *, group_size: int, window: int | None) -> NativePlan:
        """The plan of all layers with one window. A token sees the `window` latest positions, its own included."""
        kept = self._lengths
        if kept is None or kept[0] is not batch.cu_seqlens or kept[1] is not batch.kv_lens:
            lengths = indices(batch.cu_seqlens), indices(batch.kv_lens)
            self._lengths = kept = (batch.cu_seqlens, batch.kv_lens, *lengths)  # those of the other KV groups too
        return NativePlan(batch.block_tables, kept[2], kept[3], group_size, window)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        plan: AttentionPlan | NativePlan,
        *,
        scale: float,
        cap: float | None = None,
    ) -> Tensor:
        """softmax(q Kᵀ · scale, capped) V for each token over its visible positions. q [T, Hq, D] -> [T, Hq, D]."""
        if isinstance(plan, AttentionPlan):
            plan = self.plan_attention(plan.batch, group_size=plan.group_size, window=plan.window)
        return attend(self._ops, q, k_cache, v_cache, plan, scale, cap)

    def record(self, max_rows: int, inputs: Sequence[Tensor], run: Callable[[], Tensor]) -> RecordedStep:
        """The ops of a step, to run them again; see `recording.record`."""
        return record(self._ops, max_rows, inputs, run)

    def plan_inputs(self, plan: NativePlan) -> Sequence[Tensor]:
        """What of a plan differs from step to step."""
        return plan.block_tables, plan.cu_seqlens, plan.kv_lens

    def _linear(
        self,
        x: Tensor,
        weight: NativeWeight,
        residual: Tensor | None,
        activation: int,
        out_type: torch.dtype,
        questions: int = 0,
    ) -> Tensor:
        w8a8 = self.quantization == "w8a8"
        return product(self._ops, x, weight, residual, activation, out_type, w8a8=w8a8, questions=questions)

    def _gated(self, gate: Tensor, up: Tensor, activation: int) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        size = gate.shape[-1]
        self._ops.gated(
            *(code(gate), gate.data_ptr(), size, up.data_ptr(), size, out.data_ptr(), size),
            *(gate.numel() // size, size, activation),
        )
        return out

    def _pack_once(self, weight: Tensor | NativeWeight, bias: Tensor | None, *, plain: bool = False) -> NativeWeight:
        if isinstance(weight, NativeWeight):
            if bias is not None:
                raise ValueError("a packed weight brings its own bias")
            return weight
        key = id(weight)
        kept = self._packed.get(key)
        if kept is None or kept[0]() is not weight:
            int8 = self.quantization is not None and not plain
            made = packed.pack(self._ops, (weight,), () if bias is None else (bias,), int8=int8)
            kept = (weakref.ref(weight, lambda _: self._packed.pop(key, None)), made)
            self._packed[key] = kept
        return kept[1]
