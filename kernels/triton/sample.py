"""Draws a token per row: argmax of the logits (greedy), or of logits / T + Gumbel noise over what the filters leave.

    logits         [R, >= V] of any float dtype, rows contiguous; columns from V on are padding
    logits_rows    int32 [S]: the row of `logits` each sample is drawn from (several may share one)
    temperature    float32 [S]; below 1e-5 is greedy, without noise
    seeds          int64 [S], the bits of the u64; positions, choices int64 [S]: with the token they key the noise
    edits          what is done to the logits before (`logit_edits`); filters: min-p, top-k, top-p (`token_filter`)
    -> token ids   int64 [S]; -1 where logits are broken (NaN, +inf, or nothing above -inf)

Among equals the lowest id wins. Rows with noise and without, with filters and without, are one kernel: pass 1 reduces
chunks of a fixed size, pass 2 the chunks of a row. A maximum is exact: a sample depends on its row and key alone, and
not on that order either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.logit_edits import LogitEdits, edit_logits
from kernels.triton.philox import DOMAIN_TOKEN, gumbel, token_words
from kernels.triton.token_filter import Filters, filter_tokens, order_keys

GREEDY_TEMPERATURE = tl.constexpr(1e-5)  # as engine/sampler.py

_CHUNK = 4096
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _draw_kernel(
    logits,
    logits_rows,
    temperature,
    seeds,
    positions,
    choices,
    cutoffs,
    best_scores,
    best_tokens,
    stride_logits,
    vocab_size,
    num_chunks,
    DOMAIN: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    sample, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(logits_rows + sample).to(tl.int64)
    heat = tl.load(temperature + sample)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    raw = tl.load(logits + row * stride_logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    score = raw
    if heat >= GREEDY_TEMPERATURE:
        seed, position, choice = tl.load(seeds + sample), tl.load(positions + sample), tl.load(choices + sample)
        word = token_words(chunk * (CHUNK // 4), seed, position, choice, DOMAIN, CHUNK // 4)
        score = raw / heat + gumbel(word)
    if FILTERED:
        score = tl.where(order_keys(raw, token) >= tl.load(cutoffs + sample), score, float("-inf"))
    # A broken logit wins with +inf, which the second pass reports.
    broken = (raw != raw) | (raw == float("inf"))
    score = tl.where(broken, float("inf"), score)
    best = tl.max(score, 0)
    winner = tl.min(tl.where((score == best) & inside, token, _NO_TOKEN), 0)
    tl.store(best_scores + sample * num_chunks + chunk, best)
    tl.store(best_tokens + sample * num_chunks + chunk, winner)


@triton.jit
def _choose_kernel(best_scores, best_tokens, token_ids, num_chunks, CHUNKS: tl.constexpr):
    sample = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    cell = sample * num_chunks + chunk
    score = tl.load(best_scores + cell, mask=chunk < num_chunks, other=float("-inf"))
    token = tl.load(best_tokens + cell, mask=chunk < num_chunks, other=_NO_TOKEN)
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, _NO_TOKEN), 0)
    finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(token_ids + sample, tl.where(finite, winner, -1).to(tl.int64))


def sample(
    logits: Tensor,
    *,
    logits_rows: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    vocab_size: int,
    edits: LogitEdits | None = None,
    filters: Filters | None = None,
) -> Tensor:
    """Token ids int64 [S]. Raises ValueError."""
    num_samples = logits_rows.shape[0]
    if logits.dim() != 2 or logits.stride(1) != 1 or not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} do not have contiguous rows of {vocab_size} tokens")
    if any(t.shape != (num_samples,) for t in (temperature, seeds, positions, choices)):
        raise ValueError(f"temperature, seeds, positions and choices must have {num_samples} entries each")
    token_ids = torch.empty(num_samples, dtype=torch.int64, device=logits.device)
    if num_samples == 0:
        return token_ids
    if edits is not None:
        logits = edit_logits(logits, logits_rows, edits, vocab_size)
        logits_rows = torch.arange(num_samples, dtype=torch.int32, device=logits.device)
    cutoffs = None
    if filters is not None:
        cutoffs = filter_tokens(
            logits,
            logits_rows=logits_rows,
            temperature=temperature,
            filters=filters,
            vocab_size=vocab_size,
            greedy_temperature=GREEDY_TEMPERATURE.value,
        )
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    scores = torch.empty(num_samples, num_chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_samples, num_chunks, dtype=torch.int32, device=logits.device)
    _draw_kernel[(num_samples, num_chunks)](
        logits,
        logits_rows,
        temperature,
        seeds,
        positions,
        choices,
        positions if cutoffs is None else cutoffs,
        scores,
        tokens,
        logits.stride(0),
        vocab_size,
        num_chunks,
        DOMAIN=DOMAIN_TOKEN,
        FILTERED=cutoffs is not None,
        CHUNK=_CHUNK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    chunks = triton.next_power_of_2(num_chunks)
    _choose_kernel[(num_samples,)](
        scores, tokens, token_ids, num_chunks, CHUNKS=chunks, num_warps=1, enable_fp_fusion=False
    )
    return token_ids
