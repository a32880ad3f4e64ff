"""Min-p, top-k and top-p of a row without sorting it: the last token that stays, found by narrowing a bracket.

Tokens are ordered by (logit descending, id ascending), as in `engine/candidates.py`; every filter keeps a prefix of
that order. A token's place is a unique 52-bit key: the logit's bits in the order of the floats, then the id, reversed.

    kept      key >= cutoff; each filter raises it. What an earlier one hid lies behind all that it left, so that a
              later one needn't look away from it: only top-p's whole is what the others left
    min-p     cutoff = the key of the lowest logit >= max + T ln(min_p)
    top-k     the largest cutoff with k keys at or above it
    top-p     the largest cutoff whose keys have top_p of the probability

One program a row. A pass counts the keys in 16 parts of the bracket and goes on in the part in which the wanted count
(or probability) is reached, until one token is left in it: 5 to 7 passes for a row of logits, at most 13. Probabilities
are summed as integers, 2^40 times exp((l - max) / T): exact, so that no order of the sum can show.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_VOCAB = 1 << 20
NO_CUTOFF = tl.constexpr(-(1 << 62))

_ID_BITS = tl.constexpr(20)
_LAST_ID = tl.constexpr((1 << 20) - 1)
_LOWEST_KEY = tl.constexpr(-(1 << 51))
_FIRST_SHIFT = tl.constexpr(48)  # 16 parts of the 52 bits
_PARTS = tl.constexpr(16)
_PART_BITS = tl.constexpr(4)
_WEIGHT_ONE = tl.constexpr(1099511627776.0)

_CHUNK = 512  # of 1024 the counts and weights of all parts do not fit the registers (bench/gpu/aot.csv)


@dataclass(frozen=True, slots=True)
class Filters:
    """top_k int32 [S], below 1 for none; top_p float64 [S], from 1 on none; min_p_depth float64 [S].

    `min_p_depth` is T ln(min_p), -inf for none.
    """

    top_k: Tensor
    top_p: Tensor
    min_p_depth: Tensor


@triton.jit
def order_keys(logit, token):
    """int64 keys of float32 logits: larger is earlier. Equal logits, 0 and -0 too, are ordered by id."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << _ID_BITS) + (_LAST_ID - token)


@triton.jit
def _narrow(row, vocab_size, wanted, top, heat, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """The largest cutoff at or above which the tokens' count (or weight) is `wanted`, which all together have."""
    part = tl.arange(0, _PARTS)
    base = tl.full([], _LOWEST_KEY, tl.int64)
    above = tl.zeros([], tl.int64)  # what lies above the bracket
    shift = tl.full([], _FIRST_SHIFT, tl.int64)
    num_inside = tl.full([], 2, tl.int32)
    while (shift >= 0) & (num_inside > 1):
        counts = tl.zeros([_PARTS, CHUNK], tl.int32)
        weights = tl.zeros([_PARTS, CHUNK], tl.int64)
        for start in range(0, vocab_size, CHUNK):
            token = start + tl.arange(0, CHUNK)
            logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            key = order_keys(logit, token)
            place = (key - base) >> shift
            inside = (token < vocab_size) & (place >= 0) & (place < _PARTS)
            here = inside[None, :] & (place[None, :] == part[:, None])
            counts += here.to(tl.int32)
            if BY_WEIGHT:
                weight = (tl.exp((logit - top) / heat) * _WEIGHT_ONE).to(tl.int64)
                weights += tl.where(here, weight[None, :], 0)
        count = tl.sum(counts, 1)
        measure = tl.sum(weights, 1) if BY_WEIGHT else count.to(tl.int64)
        down_to = above + tl.sum(tl.where(part[None, :] >= part[:, None], measure[None, :], 0), 1)
        found = tl.max(tl.where(down_to >= wanted, part, -1), 0)
        above += tl.sum(tl.where(part > found, measure, 0), 0)
        num_inside = tl.sum(tl.where(part == found, count, 0), 0)
        base += found.to(tl.int64) << shift
        shift -= _PART_BITS
    return base


@triton.jit
def _filter_kernel(
    logits,
    logits_rows,
    temperature,
    top_ks,
    top_ps,
    min_p_depths,
    cutoffs,
    stride_logits,
    vocab_size,
    GREEDY_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    sample = tl.program_id(0)
    row = logits + tl.load(logits_rows + sample).to(tl.int64) * stride_logits
    heat, top_k, top_p = tl.load(temperature + sample), tl.load(top_ks + sample), tl.load(top_ps + sample)
    depth = tl.load(min_p_depths + sample)
    cutoff = tl.full([], NO_CUTOFF, tl.int64)
    if (heat >= GREEDY_TEMPERATURE) & ((top_k > 0) | (top_p < 1.0) | (depth > float("-inf"))):
        highest = tl.full([CHUNK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, CHUNK):
            token = start + tl.arange(0, CHUNK)
            highest = tl.maximum(
                highest, tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            )
        top = tl.max(highest, 0)
        if depth > float("-inf"):
            floor = tl.minimum((top.to(tl.float64) + depth).to(tl.float32), top)
            cutoff = order_keys(floor, _LAST_ID)
        if (top_k > 0) & (top_k < vocab_size):
            cutoff = tl.maximum(cutoff, _narrow(row, vocab_size, top_k.to(tl.int64), top, heat, False, CHUNK))
        if top_p < 1.0:
            weights = tl.zeros([CHUNK], tl.int64)
            for start in range(0, vocab_size, CHUNK):
                token = start + tl.arange(0, CHUNK)
                logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
                weight = (tl.exp((logit - top) / heat) * _WEIGHT_ONE).to(tl.int64)
                weights += tl.where((token < vocab_size) & (order_keys(logit, token) >= cutoff), weight, 0)
            exact = tl.sum(weights, 0).to(tl.float64) * top_p
            wanted = exact.to(tl.int64)
            wanted += (wanted.to(tl.float64) < exact).to(tl.int64)
            cutoff = tl.maximum(cutoff, _narrow(row, vocab_size, tl.maximum(wanted, 1), top, heat, True, CHUNK))
    tl.store(cutoffs + sample, cutoff)


def filter_tokens(
    logits: Tensor,
    *,
    logits_rows: Tensor,
    temperature: Tensor,
    filters: Filters,
    vocab_size: int,
    greedy_temperature: float,
) -> Tensor:
    """Cutoffs int64 [S], for rows as in `sample`: a token may be drawn if its `order_keys` reaches it.

    Rows below `greedy_temperature` have none. Raises ValueError.
    """
    num_samples = logits_rows.shape[0]
    if any(t.shape != (num_samples,) for t in (filters.top_k, filters.top_p, filters.min_p_depth)):
        raise ValueError(f"top_k, top_p and min_p_depth must have {num_samples} entries each")
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; filters take at most {MAX_VOCAB}")
    cutoffs = torch.empty(num_samples, dtype=torch.int64, device=logits.device)
    if num_samples:
        _filter_kernel[(num_samples,)](
            logits,
            logits_rows,
            temperature,
            filters.top_k,
            filters.top_p,
            filters.min_p_depth,
            cutoffs,
            logits.stride(0),
            vocab_size,
            GREEDY_TEMPERATURE=greedy_temperature,
            CHUNK=_CHUNK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return cutoffs
