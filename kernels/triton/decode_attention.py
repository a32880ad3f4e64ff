"""Paged decode attention: softmax(q Kᵀ · scale, capped) V for the few newest tokens of each sequence.

    q                   [T, Hq, D], the tokens of all sequences one after another; Hq = G * Hkv
    k_cache, v_cache    one layer, [num_blocks, Hkv, block_size, D], rows contiguous, other strides free (64-bit)
    cu_seqlens          int32 [S + 1]: sequence s has rows cu_seqlens[s] : cu_seqlens[s + 1]; none is allowed (padding)
    kv_lens             int32 [S], these tokens included
    block_tables        int32 [S, B]
    k_scale, v_scale    float32 [num_blocks, Hkv, block_size], of an e4m3 cache (`fp8`): what stands there times the
                        token's scale is meant
    out                 [T, Hq, D]

Pass 1, a program per (sequence, kv head) and every so many splits, writes each split's (top, norm, total) in float32;
pass 2, one program per (sequence, query head), merges a row's splits in order. The split size is fixed, so a row is
summed the same way in every batch, and the same way as in prefill. Extra traffic: G * 2 * 4 D bytes per split of
SPLIT * 4 D bytes of bf16 KV, 3 % at G = 4. A choice by batch size would only save programs that a full batch does not
need (docs/gpu.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged import split_size
from kernels.triton.attention_shapes import (
    MAX_TILE_ROWS,
    check_attention_inputs,
    decode_rows,
    fp8_kind,
    kv_tile,
)
from kernels.triton.attention_tile import NO_SCORE, attend_split, first_split, merge
from kernels.triton.device import device_arch
from kernels.triton.fp8 import as_bytes

LOG2_E = 1.4426950408889634

_PROGRAMS = 4096
"""Of pass 1: ten for each that an H200 runs at once. More would only start and end where contexts are short; which
program computes a split shows in no bit."""


@triton.jit(do_not_specialize=["num_parts", "num_splits", "stride_table"])
def _split_kernel(
    q,
    k_cache,
    v_cache,
    cu_seqlens,
    query_starts,
    kv_lens,
    block_tables,
    part_total,  # float32 [T, Hq, splits, D]
    part_norm,  # float32 [2, T, Hq, splits]: norm, top
    k_scale,
    v_scale,
    scale,
    cap,
    num_parts,  # T * Hq * splits
    num_splits,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_head,
    stride_k_slot,
    stride_v_block,
    stride_v_head,
    stride_v_slot,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    num_heads,
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
    sequence, kv_head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + sequence)
    num_tokens = tl.load(cu_seqlens + sequence + 1) - start
    kv_len = tl.load(kv_lens + sequence)
    earliest = kv_len - num_tokens
    first = first_split(earliest, SPLIT, WINDOW)
    splits = tl.cdiv(kv_len, SPLIT) - first
    if num_tokens == 0 or program >= splits:
        return
    row = tl.arange(0, M)
    dim = tl.arange(0, DP)
    token = row // G
    head = kv_head * G + row % G
    valid = token < num_tokens
    inside = valid[:, None] & (dim < D)[None, :]
    q_row = (tl.load(query_starts + sequence) + token).to(tl.int64) * stride_q_token + head * stride_q_head
    queries = tl.load(q + q_row[:, None] + dim[None, :], mask=inside, other=0.0)
    low = earliest * 0
    if WINDOW > 0:
        low = tl.maximum(earliest - WINDOW + 1, 0)
    for split in tl.range(program, splits, tl.num_programs(2), disable_licm=True):
        top, norm, total = attend_split(
            queries,
            tl.where(valid, earliest + token, -1),
            k_cache + kv_head.to(tl.int64) * stride_k_head,
            v_cache + kv_head.to(tl.int64) * stride_v_head,
            k_scale + kv_head.to(tl.int64) * stride_scale_head,
            v_scale + kv_head.to(tl.int64) * stride_scale_head,
            block_tables + sequence.to(tl.int64) * stride_table,
            (first + split) * SPLIT,
            low,
            kv_len,
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
        part = ((start + token).to(tl.int64) * num_heads + head) * num_splits + split
        tl.store(part_norm + part, norm, mask=valid)
        tl.store(part_norm + num_parts + part, top, mask=valid)
        tl.store(part_total + part[:, None] * D + dim[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["num_parts", "num_splits"])
def _merge_kernel(
    part_total,
    part_norm,
    out,
    cu_seqlens,
    query_starts,
    kv_lens,
    num_parts,
    num_splits,
    stride_out_token,
    stride_out_head,
    num_heads,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens + sequence)
    num_tokens = tl.load(cu_seqlens + sequence + 1) - start
    kv_len = tl.load(kv_lens + sequence)
    splits = tl.cdiv(kv_len, SPLIT) - first_split(kv_len - num_tokens, SPLIT, WINDOW)
    dim = tl.arange(0, DP)
    one = tl.arange(0, 1)
    for step in range(num_tokens):
        token = (start + step).to(tl.int64)
        top = tl.full([1], NO_SCORE, tl.float32)
        norm = tl.zeros([1], tl.float32)
        total = tl.zeros([1, DP], tl.float32)
        part = (token * num_heads + head) * num_splits + one
        for split in tl.range(0, splits, num_stages=4):
            split_norm = tl.load(part_norm + part + split)
            split_top = tl.load(part_norm + num_parts + part + split)
            cell = part_total + (part + split)[:, None] * D + dim[None, :]
            split_total = tl.load(cell, mask=(dim < D)[None, :], other=0.0)
            top, norm, total = merge(top, norm, total, split_top, split_norm, split_total)
        result = total / norm[:, None]
        row = (tl.load(query_starts + sequence) + step).to(tl.int64)
        cell = out + row * stride_out_token + head * stride_out_head + dim
        tl.store(cell[None, :], result.to(out.dtype.element_ty), mask=(dim < D)[None, :])


def _stages(padded_dim: int, arch: int) -> int:
    """KV tiles in flight; on sm_100 small heads spill 8 bytes with more than 2 (bench/gpu/aot.csv)."""
    if padded_dim <= 64 and arch == 100:
        return 2
    return 4 if padded_dim <= 128 else 3


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    max_kv_len: int,
    scale: float,
    query_starts: Tensor | None = None,
    num_tokens: int | None = None,
    out: Tensor | None = None,
    window: int | None = None,
    cap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Every sequence has at most `decode_rows // G` tokens; no `kv_lens` is above `max_kv_len` (only the
    grid and the workspace depend on it, so that a CUDA graph is captured with an upper bound). Raises ValueError.

    Of a batch that has other sequences too, `cu_seqlens` counts only these ones' tokens, `num_tokens` in all, and
    `query_starts` int32 [S] says where in q, and in `out`, each begins; other rows of `out` stay as they are.
    """
    num_heads, head_dim = q.shape[1:]
    num_tokens = q.shape[0] if num_tokens is None else num_tokens
    num_kv_heads, block_size = k_cache.shape[1:3]
    check_attention_inputs(q, k_cache, v_cache, block_tables)
    fp8 = fp8_kind(k_cache, k_scale, v_scale)
    out = torch.empty_like(q) if out is None else out
    query_starts = cu_seqlens if query_starts is None else query_starts
    if num_tokens == 0:
        return out
    split = split_size(block_size)
    reach = max_kv_len if window is None else min(max_kv_len, window + MAX_TILE_ROWS + 2 * split)
    num_splits = triton.cdiv(reach, split)
    part_total = torch.empty(num_tokens, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    part_norm = torch.empty(2, num_tokens, num_heads, num_splits, dtype=torch.float32, device=q.device)
    num_parts = num_tokens * num_heads * num_splits
    padded_dim = max(triton.next_power_of_2(head_dim), 16)
    num_sequences = kv_lens.shape[0]
    programs = min(num_splits, triton.cdiv(_PROGRAMS, num_sequences * num_kv_heads))
    _split_kernel[(num_sequences, num_kv_heads, programs)](
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        cu_seqlens,
        query_starts,
        kv_lens,
        block_tables,
        part_total,
        part_norm,
        kv_lens if k_scale is None else k_scale,
        kv_lens if v_scale is None else v_scale,
        scale * LOG2_E,
        0.0 if cap is None else cap * LOG2_E,
        num_parts,
        num_splits,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        0 if k_scale is None else k_scale.stride(0),
        0 if k_scale is None else k_scale.stride(1),
        block_tables.stride(0),
        num_heads,
        G=num_heads // num_kv_heads,
        D=head_dim,
        DP=padded_dim,
        M=decode_rows(head_dim, device_arch(q.device), fp8=fp8 > 0),
        N=kv_tile(head_dim, device_arch(q.device), fp8=fp8 > 0),
        SPLIT=split,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAPPED=cap is not None,
        FP8=fp8,
        num_warps=4 if padded_dim <= 128 else 8,
        enable_fp_fusion=False,
        num_stages=_stages(padded_dim, device_arch(q.device)),
    )
    _merge_kernel[(num_sequences, num_heads)](
        part_total,
        part_norm,
        out,
        cu_seqlens,
        query_starts,
        kv_lens,
        num_parts,
        num_splits,
        out.stride(0),
        out.stride(1),
        num_heads,
        D=head_dim,
        DP=padded_dim,
        SPLIT=split,
        WINDOW=window or 0,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out
