"""The part that decode and prefill attention share: a tile of query rows against one split of the paged KV.

    tile        M rows = tokens x the query heads of one kv head, so that a KV block is read once for the whole group:
                row r is token r // G of the tile and head r % G of the group
    split       SPLIT tokens of KV, from a multiple of SPLIT on, whatever the batch or the chunk
    result      top [M] the largest score, norm [M] and total [M, D] the sums of exp2(score - top) and of that times v

Scores are in units of log2: scale includes log2(e). A row that sees nothing in a split gives (NO_SCORE, 0, 0), and
`merge` with that changes no bit: exp2(0) = 1, exp2(-1e30) = 0. So which splits and KV tiles a tile skips can't show.
Splits are merged one by one, in order, with the same roundings in both kernels.
"""

import triton
import triton.language as tl

from kernels.triton.fp8 import from_e4m3

NO_SCORE = tl.constexpr(-1.0e30)  # below every score, and finite, so that exp2(a - b) is never NaN


@triton.jit
def attend_split(
    q,  # [M, DP]
    position,  # [M], the rows' absolute positions; -1 for padding, which sees nothing
    k_cache,  # of the tile's kv head
    v_cache,
    k_scale,  # float32, a scale for each token, of an e4m3 cache
    v_scale,
    table,  # the sequence's row of the block tables
    begin,  # first position of the split
    low,  # no row sees less than `low` ...
    high,  # ... nor `high` and more
    scale,
    cap,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    stride_scale_block,
    D: tl.constexpr,
    DP: tl.constexpr,  # D padded to a power of two
    M: tl.constexpr,
    N: tl.constexpr,  # KV tokens a step
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,  # 0: the cache has q's type; 1: e4m3, 2: e4m3 that the device converts
):
    """Online softmax over the split's tiles of N tokens."""
    top = tl.full([M], NO_SCORE, tl.float32)
    norm = tl.zeros([M], tl.float32)
    total = tl.zeros([M, DP], tl.float32)
    dim = tl.arange(0, DP)
    first = begin + tl.maximum(low - begin, 0) // N * N
    end = tl.minimum(begin + SPLIT, high)
    for start in range(first, end, N):
        key = start + tl.arange(0, N)
        inside = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        k_cell = block * stride_k_block + slot * stride_k_slot
        k = tl.load(k_cache + k_cell[None, :] + dim[:, None], mask=inside[None, :] & (dim < D)[:, None], other=0)
        if FP8 > 0:
            k = from_e4m3(k, q.dtype, FP8 == 2)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if FP8 > 0:
            token_scale = block * stride_scale_block + slot
            scores *= tl.load(k_scale + token_scale, mask=inside, other=0.0)[None, :]
        if CAPPED:
            # cap * tanh(s / cap), tanh(x) = 1 - 2 / (1 + exp(2x)); cap and s are in log2 units, exp(2x) = exp2(2.885 x)
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores / cap * 2.8853900817779268))
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        norm = tl.fma(norm, shrink, tl.sum(weights, 1))
        v_cell = block * stride_v_block + slot * stride_v_slot
        v = tl.load(v_cache + v_cell[:, None] + dim[None, :], mask=inside[:, None] & (dim < D)[None, :], other=0)
        if FP8 > 0:
            v = from_e4m3(v, q.dtype, FP8 == 2)
            weights *= tl.load(v_scale + token_scale, mask=inside, other=0.0)[None, :]
        total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, norm, total


@triton.jit
def merge(top, norm, total, split_top, split_norm, split_total):
    """Adds one split to what the splits before it gave. Shapes [...], [...], [..., D]."""
    new_top = tl.maximum(top, split_top)
    shrink = tl.exp2(top - new_top)
    weight = tl.exp2(split_top - new_top)
    norm = tl.fma(norm, shrink, split_norm * weight)
    total = tl.fma(total, tl.expand_dims(shrink, -1), split_total * tl.expand_dims(weight, -1))
    return new_top, norm, total


@triton.jit
def first_split(position, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """The first split that a token at `position` sees."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0) // SPLIT
    return position * 0
