"""Attention over the paged cache, and what is stored there, on the native kernels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.cpu.arguments import address, code
from kernels.cpu.spaced_rows import spaced_rows
from kernels.kv_cells import Cells, KvFormat
from kernels.paged import PagedBatch

_CELL_FORMATS: dict[KvFormat, int] = {"int8": 1, "fp8_e4m3": 2}

Norms = tuple[Tensor | None, Tensor | None, float, bool]
"""Weights of q's and k's norm, or none, epsilon, and whether the weights count from 1."""


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What attention needs to know of a step's sequences; made once a step for each window."""

    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lens: Tensor
    group_size: int
    window: int | None


def rope_and_store(
    ops: Any, qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Cells, v_cache: Cells, batch: PagedBatch, norms: Norms
) -> Tensor:
    """See `NativeKernels.rope_and_store`."""
    q_norm, k_norm, eps, unit_offset = norms
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    stride, element = qkv.stride(0), qkv.element_size()
    q = qkv.data_ptr()
    k = q + num_heads * head_dim * element
    v = k + num_kv_heads * head_dim * element
    ops.rope_and_store(
        *(code(qkv), q, stride, k, stride, v, stride, q, stride, cos.data_ptr(), sin.data_ptr()),
        *(address(q_norm), address(k_norm), eps, unit_offset),
        *(*_place(k_cache), *_place(v_cache)),
        *(batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr()),
        *(qkv.shape[0], num_heads, num_kv_heads, head_dim, _cells(k_cache), k_cache.shape[2]),
    )
    return qkv[:, : num_heads * head_dim].view(qkv.shape[0], num_heads, head_dim)


def attend(
    ops: Any, q: Tensor, k_cache: Cells, v_cache: Cells, plan: NativePlan, scale: float, cap: float | None
) -> Tensor:
    """See `NativeKernels.paged_attention`."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    rows = q if q.stride(2) == 1 and q.stride(1) == head_dim else q.contiguous()
    out = spaced_rows(q.shape[0], q.shape[1] * q.shape[2], q.dtype).view(q.shape)
    tables = plan.block_tables
    ops.attention(
        *(code(q), rows.data_ptr(), rows.stride(0)),
        *(*_place(k_cache), *_place(v_cache)),
        *(out.data_ptr(), out.stride(0), tables.data_ptr(), tables.stride(0)),
        *(plan.cu_seqlens.data_ptr(), plan.kv_lens.data_ptr(), plan.kv_lens.shape[0]),
        *(num_kv_heads, plan.group_size, head_dim, block_size, _cells(k_cache)),
        *(plan.window or 0, scale, cap or 0.0),
    )
    return out


def _place(cells: Cells) -> tuple[int, int, int]:
    """Where they begin, and the strides of blocks and heads. In quantized ones the scales follow a cell's values."""
    values = cells if isinstance(cells, Tensor) else cells.values
    return values.data_ptr(), values.stride(0), values.stride(1)


def _cells(cells: Cells) -> int:
    return 0 if isinstance(cells, Tensor) else _CELL_FORMATS[cells.kind]
