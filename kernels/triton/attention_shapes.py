"""What decode and prefill attention fix by head size, architecture and cache alone (tiles), and what they check."""

from torch import Tensor

from kernels.triton.device import device_arch
from kernels.triton.fp8 import CACHE_DTYPE, check_scales, has_conversion

MAX_TILE_ROWS = 64
"""Prefill's rows per warpgroup on sm_90: with fewer, decode would take another matrix instruction than prefill does."""


def kv_tile(head_dim: int, arch: int, *, fp8: bool) -> int:
    """KV tokens a step, the same in prefill: what its two accumulators leave registers for (bench/gpu/aot.csv)."""
    if fp8 and head_dim > 64 and arch == 100:
        return 16
    return 64 if head_dim <= 64 and arch == 90 else 32


def tile_rows(head_dim: int, arch: int, *, fp8: bool = False) -> int:
    """Rows of prefill's tiles: the most whose two float32 accumulators fit 8 warps' registers (bench/gpu/aot.csv).

    With an e4m3 cache and heads above 128, wgmma's 64 rows leave none for the conversion on sm_90: 32, by mma.sync.
    """
    rows = 128 if arch == 90 and not (fp8 and head_dim > 128) else 64
    return rows if head_dim <= 128 else rows // 2


def decode_rows(head_dim: int, arch: int, *, fp8: bool = False) -> int:
    """Rows of a decode tile. A sequence may have as many tokens in a step as fit it: rows // group size."""
    return min(MAX_TILE_ROWS, tile_rows(head_dim, arch, fp8=fp8))


def fp8_kind(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> int:
    """What `attend_split` calls FP8. Raises ValueError."""
    if not check_scales(k_cache, k_scale, v_scale):
        return 0
    return 2 if has_conversion(device_arch(k_cache.device)) else 1


def check_attention_inputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor) -> None:
    """Raises ValueError, naming what does not fit."""
    if k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, K {tuple(k_cache.shape)} and V {tuple(v_cache.shape)} do not fit")
    rows = decode_rows(q.shape[2], device_arch(q.device), fp8=k_cache.dtype == CACHE_DTYPE)
    if q.shape[1] // k_cache.shape[1] > rows:
        raise ValueError(f"{q.shape[1] // k_cache.shape[1]} query heads per kv head, at most {rows} fit a tile")
    if v_cache.dtype != k_cache.dtype or k_cache.dtype not in (q.dtype, CACHE_DTYPE):
        raise ValueError(f"q is {q.dtype}, the cache {k_cache.dtype} and {v_cache.dtype}")
    if q.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or block_tables.stride(1) != 1:
        raise ValueError("the last dimension of q, K, V and block_tables must be contiguous")
