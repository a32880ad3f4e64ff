"""Changes to logits before a token is drawn, in the order and with the roundings of `engine/logit_adjustment.py`.

    x = -inf where the token is not allowed
    x = x + bias                                        (-inf: suppressed)
    x = x / repetition if x > 0 else x · repetition     where the token was seen in prompt or output
    x = x - frequency · count - presence                where it is in the output, count times

A sample's own row is made, [S, V] float32, since several samples may share a row of logits. Pass 1 copies and masks it,
pass 2 changes the few tokens that are named; each program has its own tokens, so no order shows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
_EDITS = 256


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Sample s changes the tokens `token_ids[starts[s] : starts[s + 1]]`, each named once.

    starts       int32 [S + 1]; `most`, a number, is the largest count of one sample
    token_ids    int32 [E]; bias float32 [E]; seen int32 [E], 0 or 1; counts int32 [E]
    repetition, frequency, presence    float32 [S]
    allowed      int32 [S, ceil(V / 32)], bit t % 32 of word t // 32 is token t's; None allows all
    """

    starts: Tensor
    most: int
    token_ids: Tensor
    bias: Tensor
    seen: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    allowed: Tensor | None = None


@triton.jit
def _copy_kernel(
    logits,
    logits_rows,
    allowed,
    out,
    stride_logits,
    stride_allowed,
    vocab_size,
    MASKED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    row = tl.load(logits_rows + sample).to(tl.int64)
    x = tl.load(logits + row * stride_logits + token, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        word = tl.load(allowed + sample * stride_allowed + token // 32, mask=inside, other=0)
        hidden = ((word >> (token % 32)) & 1) == 0
        # A broken logit is not hidden: the draw reports it.
        x = tl.where(hidden & (x < float("inf")), float("-inf"), x)
    tl.store(out + sample * vocab_size + token, x, mask=inside)


@triton.jit
def _edit_kernel(
    out, starts, token_ids, bias, seen, counts, repetition, frequency, presence, vocab_size, EDITS: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    edit = tl.load(starts + sample) + tl.program_id(1) * EDITS + tl.arange(0, EDITS)
    inside = edit < tl.load(starts + sample + 1)
    cell = out + sample * vocab_size + tl.load(token_ids + edit, mask=inside, other=0)
    x = tl.load(cell, mask=inside, other=0.0) + tl.load(bias + edit, mask=inside, other=0.0)
    penalty = tl.zeros([EDITS], tl.float32) + tl.load(repetition + sample)
    repeated = tl.where(x > 0, tl.div_rn(x, penalty), x * penalty)
    x = tl.where(tl.load(seen + edit, mask=inside, other=0) != 0, repeated, x)
    count = tl.load(counts + edit, mask=inside, other=0)
    less = x - tl.load(frequency + sample) * count.to(tl.float32) - tl.load(presence + sample)
    tl.store(cell, tl.where(count > 0, less, x), mask=inside)


def edit_logits(logits: Tensor, logits_rows: Tensor, edits: LogitEdits, vocab_size: int) -> Tensor:
    """logits [R, >= V] of any float dtype, logits_rows int32 [S] -> float32 [S, V]. Raises ValueError."""
    num_samples = logits_rows.shape[0]
    if edits.starts.shape != (num_samples + 1,):
        raise ValueError(f"starts {tuple(edits.starts.shape)} must have {num_samples + 1} entries")
    if any(t.shape != (num_samples,) for t in (edits.repetition, edits.frequency, edits.presence)):
        raise ValueError(f"repetition, frequency and presence must have {num_samples} entries each")
    words = triton.cdiv(vocab_size, 32)
    allowed = edits.allowed
    if allowed is not None and (allowed.shape != (num_samples, words) or not allowed.is_contiguous()):
        raise ValueError(f"allowed {tuple(allowed.shape)} must be contiguous [{num_samples}, {words}]")
    out = torch.empty(num_samples, vocab_size, dtype=torch.float32, device=logits.device)
    if num_samples == 0:
        return out
    _copy_kernel[(num_samples, triton.cdiv(vocab_size, _CHUNK))](
        logits,
        logits_rows,
        logits_rows if allowed is None else allowed,
        out,
        logits.stride(0),
        words,
        vocab_size,
        MASKED=allowed is not None,
        CHUNK=_CHUNK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    if edits.most:
        changes = (edits.token_ids, edits.bias, edits.seen, edits.counts)
        penalties = (edits.repetition, edits.frequency, edits.presence)
        _edit_kernel[(num_samples, triton.cdiv(edits.most, _EDITS))](
            out, edits.starts, *changes, *penalties, vocab_size, EDITS=_EDITS, num_warps=4, enable_fp_fusion=False
        )
    return out
