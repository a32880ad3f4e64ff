"""Rotary embedding of q and k, fused with storing k and v in their slots of the paged cache.

    q [T, Hq, D], k and v [T, Hkv, D], rows contiguous     cos, sin float32 [T, D / 2]
    slots int64 [T]: block id * block_size + offset; negative ones are padding and store nothing
    caches [num_blocks, Hkv, block_size, D]                 -> rotated q [T, Hq, D]
    k_scale, v_scale float32 [num_blocks, Hkv, block_size]: only of an e4m3 cache (`fp8`); they get each token's scale,
    the cache k and v over it, both as `kernels.kv_cells.quantize` makes them of what a plain cache would get

The pairs are (x[i], x[i + D / 2]); float32 inside, rounded once. A program takes TOKENS tokens of one head: the query
heads first, then the kv heads, each with its k and its v. Elementwise, so row-invariant.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.fp8 import as_bytes, check_scales, quantize_e4m3

_TOKENS = 8


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_write_kernel(
    q,
    k,
    v,
    q_out,
    k_cache,
    v_cache,
    cos,
    sin,
    slots,
    k_scale,
    v_scale,
    num_tokens,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_block,
    stride_k_cache_head,
    stride_k_slot,
    stride_v_block,
    stride_v_cache_head,
    stride_v_slot,
    stride_scale_block,
    stride_scale_head,
    HQ: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,  # HALF padded to a power of two
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, COLUMNS)[None, :]
    valid = token < num_tokens
    inside = valid[:, None] & (column < HALF)
    angle = token[:, None] * HALF + column
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if head < HQ:
        source = q + token[:, None] * stride_q_token + head * stride_q_head + column
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        target = q_out + (token[:, None] * HQ + head) * (2 * HALF) + column
        tl.store(target, (first * c - second * s).to(q_out.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (second * c + first * s).to(q_out.dtype.element_ty), mask=inside)
    else:
        kv_head = head - HQ
        slot = tl.load(slots + token, mask=valid, other=-1)
        stored = (slot >= 0)[:, None]
        inside = inside & stored
        block, offset = (slot // BLOCK_SIZE)[:, None], (slot % BLOCK_SIZE)[:, None]
        source = k + token[:, None] * stride_k_token + kv_head * stride_k_head + column
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        cell = block * stride_k_block + kv_head * stride_k_cache_head + offset * stride_k_slot
        scale = block * stride_scale_block + kv_head * stride_scale_head + offset
        turned, other = first * c - second * s, second * c + first * s
        _store(turned, other, k, k_cache + cell + column, k_scale + scale, stored, inside, HALF, FP8)
        source = v + token[:, None] * stride_v_token + kv_head * stride_v_head + column
        cell = block * stride_v_block + kv_head * stride_v_cache_head + offset * stride_v_slot
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        _store(first, second, v, v_cache + cell + column, v_scale + scale, stored, inside, HALF, FP8)


@triton.jit
def _store(first, second, source, target, scale, stored, inside, HALF: tl.constexpr, FP8: tl.constexpr):
    """Both halves of rows, float32, as the cache has them; for e4m3 rounded to the compute dtype before."""
    if FP8:
        first = first.to(source.dtype.element_ty).to(tl.float32)
        second = second.to(source.dtype.element_ty).to(tl.float32)
        first, second, scales = quantize_e4m3(first, second)
        tl.store(scale, scales[:, None], mask=stored)
    tl.store(target, first.to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(target.dtype.element_ty), mask=inside)


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Returns the rotated q; the rotated k, and v, are in the cache. Raises ValueError."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    if head_dim % 2 or k.shape != (num_tokens, num_kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: not of one kind")
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != head_dim:
        raise ValueError(f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} for head size {head_dim}")
    if any(t.stride(-1) != 1 for t in (q, k, v, k_cache, v_cache)):
        raise ValueError("the last dimension of q, k, v and the caches must be contiguous")
    table_shape = (num_tokens, head_dim // 2)
    if cos.shape != table_shape or sin.shape != table_shape or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be contiguous {table_shape}")
    if slots.shape != (num_tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [{num_tokens}], not {slots.dtype} {tuple(slots.shape)}")
    fp8 = check_scales(k_cache, k_scale, v_scale)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    _rope_write_kernel[(triton.cdiv(num_tokens, _TOKENS), num_heads + num_kv_heads)](
        q,
        k,
        v,
        q_out,
        as_bytes(k_cache),
        as_bytes(v_cache),
        cos,
        sin,
        slots,
        slots if k_scale is None else k_scale,
        slots if v_scale is None else v_scale,
        num_tokens,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if k_scale is None else k_scale.stride(0),
        0 if k_scale is None else k_scale.stride(1),
        HQ=num_heads,
        HALF=head_dim // 2,
        COLUMNS=triton.next_power_of_2(head_dim // 2),
        TOKENS=_TOKENS,
        BLOCK_SIZE=block_size,
        FP8=fp8,
        num_warps=1 if head_dim <= 128 else 2,
        enable_fp_fusion=False,
    )
    return q_out
