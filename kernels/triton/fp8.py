"""e4m3 on the device: 4 bits of exponent, 3 of mantissa, no infinities, largest 448; the bits of torch.float8_e4m3fn.

A cache of these holds x / scale, with a float32 scale for each token of each kv head of a layer, of K and of V
(`kernels/kv_cells.py`, whose bytes these are): a scale of more than one token would make it depend on its neighbours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CACHE_DTYPE = torch.float8_e4m3fn
MAX_E4M3 = tl.constexpr(448.0)
LEAST_E4M3 = tl.constexpr(0.015625)


@triton.jit
def to_e4m3(x):
    """float32 -> uint8, rounded to nearest even, beyond the largest to the largest; NaN stays NaN."""
    size = tl.minimum(tl.abs(x), MAX_E4M3)
    bits = size.to(tl.int32, bitcast=True)
    # 3 of 23 bits of mantissa stay; an exponent's bias is 7, not 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, as that of float32 is at 2^14: adding 2^14 rounds to it.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(size < 0.015625, small, normal)
    rounded = tl.where(x != x, 0x7F, rounded)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (rounded | sign).to(tl.uint8)


@triton.jit
def quantize_e4m3(first, second):
    """float32 [T, C] twice, the halves of rows -> uint8 [T, C] twice, and float32 scales [T].

    The scale is the row's largest size over 448; a row that isn't finite gets such a one. No subnormals.
    """
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    odd = tl.max(((first != first) | (second != second)).to(tl.int32), 1) > 0
    largest = tl.where(odd, float("nan"), largest)
    limit = tl.zeros_like(largest) + MAX_E4M3
    inverse = tl.where(largest == 0.0, 0.0, tl.div_rn(limit, tl.where(largest == 0.0, 1.0, largest)))
    return _scaled(first, inverse), _scaled(second, inverse), tl.div_rn(largest, limit)


@triton.jit
def _scaled(x, inverse):
    x = x * inverse[:, None]
    x = tl.where(x != x, MAX_E4M3, x)
    return to_e4m3(tl.where(tl.abs(x) < LEAST_E4M3, 0.0, x))


@triton.jit
def from_e4m3(bits, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 -> `dtype`, exactly. NATIVE: by the device's own conversion, which sm_80 lacks."""
    if NATIVE:
        wide = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # As the high bits of float16 it is 2^-8 times the value, subnormals too.
        half = ((bits.to(tl.uint16) & 0x80) << 8) | ((bits.to(tl.uint16) & 0x7F) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide)
    return wide.to(dtype)


def has_conversion(arch: int) -> bool:
    """Whether the device converts e4m3 itself."""
    return arch >= 89


def check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> bool:
    """Whether the cache is e4m3. Raises ValueError when scales lack, don't fit, or are there without need."""
    is_fp8 = k_cache.dtype == CACHE_DTYPE
    shape = tuple(k_cache.shape[:3])
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if is_fp8 and (scale is None or scale.shape != shape or scale.dtype != torch.float32):
            found = None if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
            raise ValueError(f"{name} of an e4m3 cache must be float32 {shape}, not {found}")
        if not is_fp8 and scale is not None:
            raise ValueError(f"{name} is for an e4m3 cache, not for {k_cache.dtype}")
    if k_scale is not None and v_scale is not None and (k_scale.stride() != v_scale.stride() or k_scale.stride(2) != 1):
        raise ValueError(f"strides of the scales: {k_scale.stride()} and {v_scale.stride()}")
    return is_fp8


def as_bytes(cache: Tensor) -> Tensor:
    """What a kernel gets: an e4m3 cache as uint8, any other as it is."""
    return cache.view(torch.uint8) if cache.dtype == CACHE_DTYPE else cache
