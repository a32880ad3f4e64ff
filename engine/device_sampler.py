"""Draws tokens where the logits are: `engine.sampler`'s rules, by the kernels of `kernels/triton`.

Integers of the noise are the CPU's, its float values within 1e-5 of them. What comes back is one token a row; a row of
which nothing could be drawn is fetched and given to the CPU's sampler, which says why.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.head_rows import HeadRows
from engine.request import TokenLogprobs
from engine.sample import SampledToken, SampleRow
from engine.sampler import GREEDY_TEMPERATURE, Sampler
from kernels.triton.logit_edits import LogitEdits
from kernels.triton.logprobs import MAX_TOP, log_probabilities
from kernels.triton.sample import sample
from kernels.triton.token_filter import Filters


class DeviceSampler:
    """Same interface and results as `engine.sampler.Sampler`. Has no state."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._host = Sampler(vocab_size)

    def sample_from(
        self, head: HeadRows, rows: Sequence[SampleRow], kept: Sequence[int]
    ) -> tuple[torch.Tensor, list[SampledToken]]:
        """See `engine.sampler.RowSampler`."""
        logits = head.logits()
        return logits, self.sample(logits, rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token per row from logits [R, V] on the device; several rows may share a `logits_row`."""
        good = [row for row in rows if row.error is None]
        drawn = iter(self._draw(logits, good))
        wanted = [row for row in good if _wants_logprobs(row)]
        token_ids = [-1 if row.error is not None else next(drawn) for row in rows]
        chosen = [(row, token_id) for row, token_id in zip(rows, token_ids, strict=True) if token_id >= 0]
        chosen = [(row, token_id) for row, token_id in chosen if _wants_logprobs(row)]
        num_top = max((row.params.logprobs or 0 for row in wanted), default=0)
        logprobs = iter(self._logprobs(logits, [row.logits_row for row, _ in chosen], [t for _, t in chosen], num_top))
        tokens = []
        for row, token_id in zip(rows, token_ids, strict=True):
            if token_id < 0 or row.params.drawable_logprobs:
                alone = logits[row.logits_row : row.logits_row + 1]
                tokens += self._host.sample(alone, [replace(row, logits_row=0)])
            elif row.params.logprobs is None:
                tokens.append(SampledToken(token_id))
            else:
                found = next(logprobs)
                top = found.top[: row.params.logprobs]
                tokens.append(SampledToken(token_id, TokenLogprobs(found.logprob, found.rank, top)))
        return tokens

    def logprobs_of(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Those of `token_ids` [R], each by its row of logits [R, V]."""
        return self._logprobs(logits, list(range(len(token_ids))), token_ids, num_top)

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        device = logits.device
        if not rows:
            return []
        keys = np.array([[row.seed % 2**64, row.position, row.choice] for row in rows], dtype=np.uint64).view(np.int64)
        seeds, positions, choices = torch.from_numpy(keys.T.copy()).to(device)
        drawn = sample(
            logits,
            logits_rows=torch.tensor([row.logits_row for row in rows], dtype=torch.int32, device=device),
            temperature=torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device),
            seeds=seeds,
            positions=positions,
            choices=choices,
            vocab_size=self.vocab_size,
            edits=pack_edits(rows, self.vocab_size, device),
            filters=pack_filters(rows, device),
        )
        return [int(token_id) for token_id in drawn.tolist()]

    def _logprobs(
        self, logits: torch.Tensor, logits_rows: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        if num_top > min(MAX_TOP, self.vocab_size):
            return self._host.logprobs_of(logits[list(logits_rows)], token_ids, num_top)
        found = log_probabilities(
            logits,
            logits_rows=torch.tensor(logits_rows, dtype=torch.int32, device=logits.device),
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=logits.device),
            num_top=num_top,
            vocab_size=self.vocab_size,
        )
        lists = (part.tolist() for part in found)
        return [
            TokenLogprobs(logprob=logprob, rank=rank, top=tuple(zip(ids, values, strict=True)))
            for logprob, rank, ids, values in zip(*lists, strict=True)
        ]


def _wants_logprobs(row: SampleRow) -> bool:
    """Those of the tokens that may be drawn are left to the CPU's sampler."""
    return row.params.logprobs is not None and not row.params.drawable_logprobs


def pack_filters(rows: Sequence[SampleRow], device: torch.device) -> Filters | None:
    """The rows' min-p, top-k and top-p; None if no row that draws at random has any."""
    params = [row.params for row in rows]
    if all(
        each.temperature < GREEDY_TEMPERATURE or (each.top_k <= 0 and each.top_p >= 1.0 and each.min_p <= 0.0)
        for each in params
    ):
        return None
    depths = [each.temperature * math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params]
    return Filters(
        torch.tensor([each.top_k for each in params], dtype=torch.int32, device=device),
        torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device),
        torch.tensor(depths, dtype=torch.float64, device=device),
    )


def pack_edits(rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> LogitEdits | None:
    """The rows' masks, suppressed tokens, bias and penalties; None if no row has any."""
    named = [_named(row, vocab_size) for row in rows]
    masked = any(row.allowed is not None for row in rows)
    if not (masked or any(named)):
        return None
    allowed = None
    if masked:
        width = -(-vocab_size // 32) * 32
        bits = np.zeros((len(rows), width), dtype=np.bool_)
        for sample_index, row in enumerate(rows):
            bits[sample_index, :vocab_size] = True if row.allowed is None else row.allowed
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        allowed = torch.from_numpy(words).to(device)
    edits = [edit for each in named for edit in each]
    starts = np.cumsum([0, *(len(each) for each in named)])

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def floats(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return LogitEdits(
        starts=ints(starts.tolist()),
        most=max(len(each) for each in named),
        token_ids=ints([token_id for token_id, _, _, _ in edits]),
        bias=floats([bias for _, bias, _, _ in edits]),
        seen=ints([seen for _, _, seen, _ in edits]),
        counts=ints([count for _, _, _, count in edits]),
        repetition=floats([row.params.repetition_penalty for row in rows]),
        frequency=floats([row.params.frequency_penalty for row in rows]),
        presence=floats([row.params.presence_penalty for row in rows]),
        allowed=allowed,
    )


def _named(row: SampleRow, vocab_size: int) -> list[tuple[int, float, int, int]]:
    """(token, bias, whether it was seen, its count in the output) of every token whose logit may change."""
    params = row.params
    bias: dict[int, float] = dict(params.logit_bias)
    bias |= dict.fromkeys((each for each in row.suppressed_token_ids if each < vocab_size), -math.inf)
    counts: Counter[int] = Counter()
    seen: set[int] = set()
    if params.frequency_penalty or params.presence_penalty:
        counts.update(row.output_token_ids)
    if params.repetition_penalty != 1.0:
        seen.update(row.prompt_token_ids, row.output_token_ids)
    ids = sorted(bias.keys() | counts.keys() | seen)
    return [(token_id, bias.get(token_id, 0.0), int(token_id in seen), counts[token_id]) for token_id in ids]
