"""Philox4x32-10 on the device: the same integers as `engine/philox.py`, and Gumbel noise in float32.

A token's word is word `vocab_id % 4` of counter (vocab_id // 4, position, choice, domain), key = seed (DESIGN §4).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DOMAIN_TOKEN = 0

_GROUPS = 1024


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds on uint32 lanes."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high2 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low2 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def token_words(first_group, seed, position, choice, DOMAIN: tl.constexpr, GROUPS: tl.constexpr):
    """The words of tokens 4 * first_group : 4 * (first_group + GROUPS), uint32 [4 * GROUPS]. seed is int64."""
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = group * 0
    key = seed.to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = philox4x32(
        group,
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero + DOMAIN,
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(word):
    """-ln(-ln u), u = (word + 1/2) / 2^32, within 1e-5 of the CPU's float64.

    float32 can't hold u near 1, where the largest noise is. There, with w = 1 - u (exact up to one rounding) and
    s = w / (2 - w) <= 1/3:  -ln u = 2 atanh(s) = 2 s (1 + s²/3 + s⁴/5 + ... + s¹²/13), cut off at 2e-8 of itself.
    """
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = ((~word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.minimum(w, 0.5)
    s = w / (2.0 - w)
    s2 = s * s
    series = 1.0 / 11.0 + s2 * (1.0 / 13.0)
    series = 1.0 / 7.0 + s2 * (1.0 / 9.0 + s2 * series)
    series = 1.0 / 3.0 + s2 * (1.0 / 5.0 + s2 * series)
    near_one = 2.0 * s + 2.0 * s * s2 * series
    exponential = tl.where(word < 0x80000000, -tl.log(tl.minimum(u, 0.5)), near_one)
    return -tl.log(exponential)


@triton.jit
def _noise_kernel(words, noise, vocab_size, seed, position, choice, DOMAIN: tl.constexpr, GROUPS: tl.constexpr):
    first_group = tl.program_id(0) * GROUPS
    drawn = token_words(first_group, tl.load(seed), tl.load(position), tl.load(choice), DOMAIN, GROUPS)
    token = first_group * 4 + tl.arange(0, 4 * GROUPS)
    tl.store(words + token, drawn.to(tl.int32, bitcast=True), mask=token < vocab_size)
    tl.store(noise + token, gumbel(drawn), mask=token < vocab_size)


def token_noise(vocab_size: int, *, seed: Tensor, position: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """One row's words (the bits of uint32, as int32 [V]) and Gumbel noise (float32 [V]).

    seed, position and choice are int64 [1]. For the tests: sampling draws the same noise where it needs it.
    """
    words = torch.empty(vocab_size, dtype=torch.int32, device=seed.device)
    noise = torch.empty(vocab_size, dtype=torch.float32, device=seed.device)
    grid = (triton.cdiv(vocab_size, 4 * _GROUPS),)
    _noise_kernel[grid](
        words, noise, vocab_size, seed, position, choice, DOMAIN=DOMAIN_TOKEN, GROUPS=_GROUPS, enable_fp_fusion=False
    )
    return words, noise
