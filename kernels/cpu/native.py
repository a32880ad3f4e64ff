"""The native kernel set for float32 and bfloat16 on the CPU: C++ in kernels/cpu/src, one op a file.

Row-invariant by construction: an output element is one chain of fused multiply-adds over ascending k, attention reduces
splits of 256 tokens in order (see ops/tiles.h, ops/attention.h), and no order depends on the number of rows or threads.
Inside an op everything is float32 and the result is rounded once; bfloat16 attention also rounds its weights.

Beside the ops of every kernel set it has fused ones, which take weights packed ahead: `gated_linear`, `rope_and_store`,
and `linear` with a residual. A plain weight is packed on first use and kept beside the original as long as that lives.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import reference, tiled
from kernels.cpu import draws, packed, routing
from kernels.cpu.draws import Draw, Drawn
from kernels.cpu.extension import Extension
from kernels.cpu.looks import Look, Looks, Seen
from kernels.cpu.lora import activate_strips, add_lora, as_strips
from kernels.cpu.packed import DTYPES, PackedWeight
from kernels.cpu.packed_groups import NUMBERS, PackedGroups
from kernels.cpu.packed_parts import PackedParts, pack_alike
from kernels.cpu.recording import RecordedStep, record
from kernels.cpu.rope_rows import RopeRows
from kernels.cpu.spaced_rows import spaced_rows
from kernels.grouped import GroupedMatrix
from kernels.int8 import Quantization
from kernels.kv_cells import Cells, KvFormat
from kernels.lora import Lora, add_to_embedding
from kernels.paged import AttentionPlan, PagedBatch, indices
from kernels.products import Product, one_by_one
from kernels.routing import Routed, RoutingRule

_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
_CELL_FORMATS: dict[KvFormat, int] = {"int8": 1, "fp8_e4m3": 2}

NativeWeight = PackedWeight | PackedGroups | PackedParts


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What attention needs to know of a step's sequences; made once a step for each window."""

    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lens: Tensor
    group_size: int
    window: int | None


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
        code = 0 if activation is None else _ACTIVATIONS[activation]
        if not _go_together(products, gated=activation is not None):
            one_by_one(products, lambda x, weight: self._linear(x, weight, None, code, x.dtype))
            return
        table = [
            (
                *(each.x.data_ptr(), each.x.stride(0), each.weight.data.data_ptr(), _address(each.weight.bias)),
                *(each.out.data_ptr(), each.out.stride(0), *each.out.shape, each.weight.num_in),
            )
            for each in products
            if len(each.x)
        ]
        if table:
            self._ops.linear_each(_code(products[0].x), table, code)

    def combine(self, results: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """`kernels.routing.combine`, to the bit. results [T * top_k, H], weights and places [T, top_k] -> [T, H]."""
        results, weights, places = results.contiguous(), weights.contiguous(), places.contiguous()
        out = torch.empty(places.shape[0], results.shape[1], dtype=results.dtype)
        self._ops.combine(
            *(_code(results), results.data_ptr(), weights.data_ptr(), places.data_ptr(), out.data_ptr()),
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
            *(_code(rows), rows.data_ptr(), rows.stride(0), 0, weight.data_ptr(), out.data_ptr(), out.stride(0), 0),
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
            *(_code(rows), rows.data_ptr(), rows.stride(-2), residual.data_ptr(), weight.data_ptr()),
            *(out.data_ptr(), out.stride(-2), total.data_ptr(), rows.numel() // size, size, eps, unit_offset),
        )
        return out, total

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y. [M, N] each."""
        x, y = (each if each.stride(1) == 1 else each.contiguous() for each in (x, y))
        out = torch.empty(x.shape, dtype=x.dtype)
        self._ops.add(_code(x), x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), out.data_ptr(), *x.shape)
        return out

    def columns(self, x: Tensor, order: Tensor) -> Tensor:
        """x's columns in another order, or some of them. x [M, K], order int64 [N] of numbers below K -> [M, N]."""
        rows = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(x.shape[0], order.shape[0], dtype=x.dtype)
        self._ops.columns(_code(x), rows.data_ptr(), rows.stride(0), order.data_ptr(), out.data_ptr(), *out.shape)
        return out

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
            *(_code(x), rows.data_ptr(), rows.stride(0), 0, 0, out.data_ptr(), out.stride(0), 0, 0),
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
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        stride, element = qkv.stride(0), qkv.element_size()
        q = qkv.data_ptr()
        k = q + num_heads * head_dim * element
        v = k + num_kv_heads * head_dim * element
        self._ops.rope_and_store(
            *(_code(qkv), q, stride, k, stride, v, stride, q, stride, cos.data_ptr(), sin.data_ptr()),
            *(_address(q_norm), _address(k_norm), eps, unit_offset),
            *(*_place(k_cache), *_place(v_cache)),
            *(batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr()),
            *(qkv.shape[0], num_heads, num_kv_heads, head_dim, _cells(k_cache), k_cache.shape[2]),
        )
        return qkv[:, : num_heads * head_dim].view(qkv.shape[0], num_heads, head_dim)

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
        x = self._embedding(ids, weight, scale)
        if lora is not None:
            add_to_embedding(x, ids, lora, scale)
        return x

    def _embedding(self, ids: Tensor, weight: Tensor | NativeWeight, scale: float | None) -> Tensor:
        if isinstance(weight, Tensor):
            return reference.embedding(ids, weight, scale)
        if isinstance(weight, PackedParts):
            raise ValueError("a weight of several parts is no embedding")
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], weight.num_in, dtype=weight.dtype)
        size = (ids.shape[0], weight.num_in, 1.0 if scale is None else _rounded(scale, weight.dtype), weight.num_out)
        if isinstance(weight, PackedGroups):
            if weight.order is not None:
                raise ValueError("a weight whose columns are in another order is no embedding")
            groups = (weight.scale_form, weight.scales.data_ptr(), _address(weight.offsets), weight.group_size)
            self._ops.embedding_grouped(
                *(DTYPES[weight.dtype], NUMBERS[weight.kind], ids.data_ptr(), weight.data.data_ptr()),
                *(*groups, out.data_ptr(), *size),
            )
            return out
        self._ops.embedding(
            *(DTYPES[weight.dtype], ids.data_ptr(), weight.data.data_ptr(), _address(weight.scales), out.data_ptr()),
            *size,
        )
        return out

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
        num_kv_heads, block_size, head_dim = k_cache.shape[1:]
        rows = q if q.stride(2) == 1 and q.stride(1) == head_dim else q.contiguous()
        out = spaced_rows(q.shape[0], q.shape[1] * q.shape[2], q.dtype).view(q.shape)
        tables = plan.block_tables
        self._ops.attention(
            *(_code(q), rows.data_ptr(), rows.stride(0)),
            *(*_place(k_cache), *_place(v_cache)),
            *(out.data_ptr(), out.stride(0), tables.data_ptr(), tables.stride(0)),
            *(plan.cu_seqlens.data_ptr(), plan.kv_lens.data_ptr(), plan.kv_lens.shape[0]),
            *(num_kv_heads, plan.group_size, head_dim, block_size, _cells(k_cache)),
            *(plan.window or 0, scale, cap or 0.0),
        )
        return out

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
        if activation:
            out = spaced_rows(x.shape[0], weight.num_out, out_type)
        else:
            out = torch.empty(x.shape[0], weight.num_out, dtype=out_type)
        if isinstance(weight, PackedParts):
            for part, columns in weight.columns():
                self._linear_into(
                    out[:, columns], x, part, None if residual is None else residual[:, columns], activation
                )
        else:
            self._linear_into(out, x, weight, residual, activation, questions)
        return out

    def _linear_into(
        self,
        out: Tensor,
        x: Tensor,
        weight: PackedWeight | PackedGroups,
        residual: Tensor | None,
        activation: int,
        questions: int = 0,
    ) -> None:
        if isinstance(weight, PackedGroups) and weight.order is not None:
            x = self.columns(x, weight.order)
        if x.dtype != weight.dtype or x.shape[1] != weight.num_in or weight.gated != bool(activation):
            raise ValueError(
                f"{x.dtype} rows of {x.shape[1]} don't fit a {'gated ' if weight.gated else ''}weight of "
                f"{weight.dtype} [{weight.num_out}, {weight.num_in}]"
            )
        if not len(out):
            return
        rows = x if x.stride(1) == 1 else x.contiguous()
        if residual is not None and residual.stride(1) != 1:
            residual = residual.contiguous()
        arguments = (
            *(_address(weight.bias), _address(residual), 0 if residual is None else residual.stride(0)),
            *(
                out.data_ptr(),
                out.stride(0),
                x.shape[0],
                weight.num_out,
                weight.num_in,
                activation,
                out.dtype != x.dtype,
            ),
        )
        data = (rows.data_ptr(), rows.stride(0), weight.data.data_ptr())
        if isinstance(weight, PackedGroups):
            groups = (weight.scale_form, weight.scales.data_ptr(), _address(weight.offsets), weight.group_size)
            self._ops.linear_grouped(DTYPES[x.dtype], NUMBERS[weight.kind], *data, *groups, *arguments, questions)
        elif weight.scales is None:
            self._ops.linear(DTYPES[x.dtype], *data, *arguments, questions)
        else:
            self._ops.linear_int8(
                *(DTYPES[x.dtype], *data, weight.scales.data_ptr(), *arguments),
                *(self.quantization == "w8a8", questions),
            )

    def _gated(self, gate: Tensor, up: Tensor, activation: int) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        size = gate.shape[-1]
        self._ops.gated(
            *(_code(gate), gate.data_ptr(), size, up.data_ptr(), size, out.data_ptr(), size),
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


def _go_together(products: Sequence[Product], *, gated: bool) -> bool:
    """Whether all weights are plain ones of one dtype, and all rows whole tiles deep: nothing has to be padded."""
    dtypes = {each.x.dtype for each in products}
    return len(dtypes) == 1 and all(
        isinstance(each.weight, PackedWeight)
        and each.weight.scales is None
        and each.weight.gated == gated
        and each.weight.dtype in dtypes
        and each.out.dtype in dtypes
        and each.x.shape[1] == each.weight.num_in
        and each.out.shape == (len(each.x), each.weight.num_out)
        and each.x.stride(1) == each.out.stride(1) == 1
        and not each.weight.num_in * each.x.element_size() % packed.DEPTH_BYTES
        for each in products
    )


def _place(cells: Cells) -> tuple[int, int, int]:
    """Where they begin, and the strides of blocks and heads. In quantized ones the scales follow a cell's values."""
    values = cells if isinstance(cells, Tensor) else cells.values
    return values.data_ptr(), values.stride(0), values.stride(1)


def _cells(cells: Cells) -> int:
    return 0 if isinstance(cells, Tensor) else _CELL_FORMATS[cells.kind]


def _code(x: Tensor) -> int:
    return DTYPES[x.dtype]


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """To the nearest of `dtype`, ties to even; without torch, which may not compute while a step is recorded."""
    bits = int(np.float32(scale).view(np.uint32))
    if dtype == torch.bfloat16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
