"""Log-probabilities of the model itself: of the chosen token, its rank, and of the N likeliest tokens.

    logits [R, >= V], logits_rows int32 [S] as in `sample`; token_ids int64 [S]
    -> logprob float32 [S], rank int32 [S], top_ids int64 [S, N], top_logprobs float32 [S, N]

Tokens are ordered by (logit descending, id ascending); rank 1 is the first. Pass 1 takes from each chunk its largest
logit, its sum of exp, its number of tokens before the chosen one, and its own N first; pass 2 merges the chunks. Chunks
are of a fixed size, so a row depends on itself alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOP = 64

_CHUNK = 4096
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


class LogProbs(NamedTuple):
    """See the file's docstring."""

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@triton.jit
def _chunk_kernel(
    logits,
    logits_rows,
    token_ids,
    peaks,  # float32 [S, chunks], then sums and counts alike
    sums,
    counts,
    top_logits,  # [S, chunks, N]
    top_tokens,
    stride_logits,
    vocab_size,
    num_chunks,
    NUM_TOP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    sample, chunk = tl.program_id(0), tl.program_id(1)
    row = logits + tl.load(logits_rows + sample).to(tl.int64) * stride_logits
    chosen = tl.load(token_ids + sample)
    chosen_logit = tl.load(row + chosen).to(tl.float32)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    logit = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    cell = sample * num_chunks + chunk
    peak = tl.max(logit, 0)
    base = tl.maximum(peak, -3.0e38)  # a chunk without any finite logit: exp(-inf - base) = 0, not NaN
    before = inside & ((logit > chosen_logit) | ((logit == chosen_logit) & (token < chosen)))
    tl.store(peaks + cell, base)
    tl.store(sums + cell, tl.sum(tl.exp(logit - base), 0))
    tl.store(counts + cell, tl.sum(before.to(tl.int32), 0))
    left = inside
    for place in range(NUM_TOP):
        best = tl.max(tl.where(left, logit, float("-inf")), 0)
        winner = tl.min(tl.where(left & (logit == best), token, _NO_TOKEN), 0)
        tl.store(top_logits + cell * NUM_TOP + place, best)
        tl.store(top_tokens + cell * NUM_TOP + place, winner)
        left = left & (token != winner)


@triton.jit
def _merge_kernel(
    logits,
    logits_rows,
    token_ids,
    peaks,
    sums,
    counts,
    top_logits,
    top_tokens,
    logprob,
    rank,
    out_ids,
    out_logprobs,
    stride_logits,
    num_chunks,
    NUM_TOP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    sample = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    cell = sample * num_chunks + chunk
    chunk_peak = tl.load(peaks + cell, mask=inside, other=-3.0e38)
    peak = tl.max(chunk_peak, 0)
    total = tl.sum(tl.load(sums + cell, mask=inside, other=0.0) * tl.exp(chunk_peak - peak), 0)
    log_total = peak + tl.log(total)
    row = logits + tl.load(logits_rows + sample).to(tl.int64) * stride_logits
    tl.store(logprob + sample, tl.load(row + tl.load(token_ids + sample)).to(tl.float32) - log_total)
    tl.store(rank + sample, 1 + tl.sum(tl.load(counts + cell, mask=inside, other=0), 0))
    if NUM_TOP > 0:
        candidate = tl.arange(0, CANDIDATES)
        left = candidate < num_chunks * NUM_TOP
        source = sample * num_chunks * NUM_TOP + candidate
        logit = tl.load(top_logits + source, mask=left, other=float("-inf"))
        token = tl.load(top_tokens + source, mask=left, other=_NO_TOKEN)
        for place in range(NUM_TOP):
            best = tl.max(tl.where(left, logit, float("-inf")), 0)
            winner = tl.min(tl.where(left & (logit == best), token, _NO_TOKEN), 0)
            tl.store(out_ids + sample * NUM_TOP + place, winner.to(tl.int64))
            tl.store(out_logprobs + sample * NUM_TOP + place, best - log_total)
            left = left & (token != winner)


def log_probabilities(
    logits: Tensor, *, logits_rows: Tensor, token_ids: Tensor, num_top: int, vocab_size: int
) -> LogProbs:
    """Every token id must be in the vocabulary. Raises ValueError."""
    num_samples = logits_rows.shape[0]
    if logits.dim() != 2 or logits.stride(1) != 1 or not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} do not have contiguous rows of {vocab_size} tokens")
    if not 0 <= num_top <= min(MAX_TOP, vocab_size) or token_ids.shape != (num_samples,):
        raise ValueError(f"num_top {num_top} of at most {min(MAX_TOP, vocab_size)}, token_ids {tuple(token_ids.shape)}")
    device, floats = logits.device, torch.float32
    result = LogProbs(
        torch.empty(num_samples, dtype=floats, device=device),
        torch.empty(num_samples, dtype=torch.int32, device=device),
        torch.empty(num_samples, num_top, dtype=torch.int64, device=device),
        torch.empty(num_samples, num_top, dtype=floats, device=device),
    )
    if num_samples == 0:
        return result
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    peaks, sums = (torch.empty(num_samples, num_chunks, dtype=floats, device=device) for _ in range(2))
    counts = torch.empty(num_samples, num_chunks, dtype=torch.int32, device=device)
    top_logits = torch.empty(num_samples, num_chunks, num_top, dtype=floats, device=device)
    top_tokens = torch.empty(num_samples, num_chunks, num_top, dtype=torch.int32, device=device)
    parts = (peaks, sums, counts, top_logits, top_tokens)
    _chunk_kernel[(num_samples, num_chunks)](
        logits,
        logits_rows,
        token_ids,
        *parts,
        logits.stride(0),
        vocab_size,
        num_chunks,
        NUM_TOP=num_top,
        CHUNK=_CHUNK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _merge_kernel[(num_samples,)](
        logits,
        logits_rows,
        token_ids,
        *parts,
        *result,
        logits.stride(0),
        num_chunks,
        NUM_TOP=num_top,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CANDIDATES=triton.next_power_of_2(max(num_chunks * num_top, 1)),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return result
