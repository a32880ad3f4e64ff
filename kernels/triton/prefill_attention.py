"""Varlen prefill attention: chunks of many tokens, causal over their own tokens and their paged prefix.

Tensors as in `decode_attention`, which also says how a KV split is summed; the step's K and V are already in the cache.
`tiles` int32 [num_tiles, 2] lists (sequence, first token in the chunk) of the query tiles, made on the host by
`prefill_tiles`. One program per (tile, kv head) walks its splits in order and merges each, so a token's result does
not depend on where the chunk began. Tiles with the most KV start first: the last programs are short ones.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged import split_size
from kernels.triton.attention_shapes import check_attention_inputs, fp8_kind, kv_tile, tile_rows
from kernels.triton.attention_tile import NO_SCORE, attend_split, first_split, merge
from kernels.triton.decode_attention import LOG2_E
from kernels.triton.device import device_arch
from kernels.triton.fp8 import as_bytes


@triton.jit(do_not_specialize=["stride_table"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    cu_seqlens,
    query_starts,
    kv_lens,
    block_tables,
    tiles,
    k_scale,
    v_scale,
    scale,
    cap,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_k_block,
    stride_k_head,
    stride_k_slot,
    stride_v_block,
    stride_v_head,
    stride_v_slot,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 2)
    first_token = tl.load(tiles + tile * 2 + 1)
    start = tl.load(cu_seqlens + sequence)
    num_tokens = tl.load(cu_seqlens + sequence + 1) - start
    start = tl.load(query_starts + sequence)
    offset = tl.load(kv_lens + sequence) - num_tokens  # position = token + offset
    row = tl.arange(0, M)
    dim = tl.arange(0, DP)
    token = first_token + row // G
    head = kv_head * G + row % G
    valid = (row // G < M // G) & (token < num_tokens)
    inside = valid[:, None] & (dim < D)[None, :]
    q_row = (start + token).to(tl.int64) * stride_q_token + head * stride_q_head
    queries = tl.load(q + q_row[:, None] + dim[None, :], mask=inside, other=0.0)
    position = tl.where(valid, offset + token, -1)
    earliest = offset + first_token
    high = offset + tl.minimum(first_token + M // G, num_tokens)
    low = earliest * 0
    if WINDOW > 0:
        low = tl.maximum(earliest - WINDOW + 1, 0)
    top = tl.full([M], NO_SCORE, tl.float32)
    norm = tl.zeros([M], tl.float32)
    total = tl.zeros([M, DP], tl.float32)
    for split in range(first_split(earliest, SPLIT, WINDOW), tl.cdiv(high, SPLIT)):
        split_top, split_norm, split_total = attend_split(
            queries,
            position,
            k_cache + kv_head.to(tl.int64) * stride_k_head,
            v_cache + kv_head.to(tl.int64) * stride_v_head,
            k_scale + kv_head.to(tl.int64) * stride_scale_head,
            v_scale + kv_head.to(tl.int64) * stride_scale_head,
            block_tables + sequence.to(tl.int64) * stride_table,
            split * SPLIT,
            low,
            high,
            scale,
            cap,
            stride_k_block,
            stride_k_slot,
            stride_v_block,
            stride_v_slot,
            stride_scale_block,
            D,
            DP,
            M,
            N,
            SPLIT,
            BLOCK_SIZE,
            WINDOW,
            CAPPED,
            FP8,
        )
        top, norm, total = merge(top, norm, total, split_top, split_norm, split_total)
    result = total / tl.where(valid, norm, 1.0)[:, None]
    out_row = (start + token).to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(out + out_row[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


def prefill_tiles(
    query_lens: Sequence[int], kv_lens: Sequence[int], *, group_size: int, head_dim: int, arch: int, fp8: bool = False
) -> Tensor:
    """int32 [num_tiles, 2], on the host: (sequence, first token) of each tile, those with the most KV first."""
    size = tile_rows(head_dim, arch, fp8=fp8) // group_size
    tiles = [
        (kv_len - query_len + first, sequence, first)
        for sequence, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True))
        for first in range(0, query_len, size)
    ]
    ordered = [(sequence, first) for _, sequence, first in sorted(tiles, key=lambda tile: -tile[0])]
    return torch.tensor(ordered, dtype=torch.int32).view(-1, 2)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    scale: float,
    query_starts: Tensor | None = None,
    out: Tensor | None = None,
    window: int | None = None,
    cap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]. `tiles` are those of `prefill_tiles` for the same lengths. Raises ValueError.

    `query_starts` and `out` as in `decode_attention`.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    check_attention_inputs(q, k_cache, v_cache, block_tables)
    fp8 = fp8_kind(k_cache, k_scale, v_scale)
    out = torch.empty_like(q) if out is None else out
    query_starts = cu_seqlens if query_starts is None else query_starts
    if tiles.shape[0] == 0:
        return out
    padded_dim = max(triton.next_power_of_2(head_dim), 16)
    _prefill_kernel[(tiles.shape[0], num_kv_heads)](
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        out,
        cu_seqlens,
        query_starts,
        kv_lens,
        block_tables,
        tiles,
        kv_lens if k_scale is None else k_scale,
        kv_lens if v_scale is None else v_scale,
        scale * LOG2_E,
        0.0 if cap is None else cap * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        0 if k_scale is None else k_scale.stride(0),
        0 if k_scale is None else k_scale.stride(1),
        block_tables.stride(0),
        G=num_heads // num_kv_heads,
        D=head_dim,
        DP=padded_dim,
        M=tile_rows(head_dim, device_arch(q.device), fp8=fp8 > 0),
        N=kv_tile(head_dim, device_arch(q.device), fp8=fp8 > 0),
        SPLIT=split_size(block_size),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAPPED=cap is not None,
        FP8=fp8,
        num_warps=8,
        enable_fp_fusion=False,
        num_stages=3,
    )
    return out
