"""Draws tokens where the logits are: `engine.sampler`'s rules, by the kernels of `kernels/triton`.

Integers of the noise are the CPU's, its float values within 1e-5 of them. What comes back is one token a row; a row of
which nothing could be drawn is fetched and given to the CPU's sampler, which says why.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from engine.device_sample_rows import pack_edits, pack_filters, pack_keys
from engine.head_rows import HeadRows
from engine.request import TokenLogprobs
from engine.sample import SampledToken, SampleRow
from engine.sampler import Sampler
from kernels.staging import HostCopy, to_device
from kernels.triton.logprobs import MAX_TOP, LogProbs, log_probabilities
from kernels.triton.sample import sample


class Draw:
    """Tokens that are being drawn from `logits`, and their log-probabilities where they are wanted."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow], host: Sampler) -> None:
        """Queues everything; `finish` waits for it."""
        self._logits = logits
        self._rows = rows
        self._host = host
        self._good = [row for row in rows if row.error is None]
        self._wanted = [i for i, row in enumerate(self._good) if wants_logprobs(row)]
        self._num_top = max((self._good[i].params.logprobs or 0 for i in self._wanted), default=0)
        self.token_ids = _draw(logits, self._good, host.vocab_size)
        """int64 [rows without an error], on the device; -1 where nothing could be drawn."""
        found: tuple[Tensor, ...] = ()
        if self._wanted and self._num_top <= min(MAX_TOP, host.vocab_size):
            (which,) = to_device([np.asarray(self._wanted, dtype=np.int64)], logits.device)
            # The -1 of a broken row would be read before its row begins.
            chosen = self.token_ids.index_select(0, which).clamp(min=0)
            rows_of_logits = [self._good[i].logits_row for i in self._wanted]
            found = _logprobs(logits, rows_of_logits, chosen, self._num_top, host.vocab_size)
        self._copy = HostCopy(self.token_ids, *found)

    def finish(self) -> list[SampledToken]:
        """One token per row."""
        drawn, *found = self._copy.lists()
        logprobs = dict(zip(self._wanted, as_logprobs(found), strict=True)) if found else {}
        tokens, of_good = [], enumerate(drawn)
        for row in self._rows:
            if row.error is not None:
                tokens += self._on_host(row)
                continue
            i, token_id = next(of_good)
            if token_id < 0 or row.params.drawable_logprobs:
                tokens += self._on_host(row)
            elif row.params.logprobs is None:
                tokens.append(SampledToken(token_id))
            else:
                known = logprobs[i] if i in logprobs else self._host_logprobs(row, token_id)
                top = known.top[: row.params.logprobs]
                tokens.append(SampledToken(token_id, TokenLogprobs(known.logprob, known.rank, top)))
        return tokens

    def _on_host(self, row: SampleRow) -> list[SampledToken]:
        alone = self._logits[row.logits_row : row.logits_row + 1]
        return self._host.sample(alone, [replace(row, logits_row=0)])

    def _host_logprobs(self, row: SampleRow, token_id: int) -> TokenLogprobs:
        alone = self._logits[row.logits_row : row.logits_row + 1]
        return self._host.logprobs_of(alone, [token_id], row.params.logprobs or 0)[0]


class DeviceSampler:
    """Same interface and results as `engine.sampler.Sampler`. Has no state."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._host = Sampler(vocab_size)

    def sample_from(
        self, head: HeadRows, rows: Sequence[SampleRow], kept: Sequence[int]
    ) -> tuple[Tensor, list[SampledToken]]:
        """See `engine.sampler.RowSampler`."""
        logits = head.logits()
        return logits, self.sample(logits, rows)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token per row from logits [R, V] on the device; several rows may share a `logits_row`."""
        return self.start(logits, rows).finish()

    def start(self, logits: Tensor, rows: Sequence[SampleRow]) -> Draw:
        """The same without waiting for it; `logits` must stay as they are until it is finished."""
        return Draw(logits, rows, self._host)

    def logprobs_of(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Those of `token_ids` [R], each by its row of logits [R, V]."""
        if num_top > min(MAX_TOP, self.vocab_size):
            return self._host.logprobs_of(logits, token_ids, num_top)
        (chosen,) = to_device([np.asarray(token_ids, dtype=np.int64)], logits.device)
        found = _logprobs(logits, range(len(token_ids)), chosen, num_top, self.vocab_size)
        return as_logprobs(HostCopy(*found).lists())


def wants_logprobs(row: SampleRow) -> bool:
    """Those of the tokens that may be drawn are left to the CPU's sampler."""
    return row.params.logprobs is not None and not row.params.drawable_logprobs


def as_logprobs(found: Sequence[Sequence[Any]]) -> list[TokenLogprobs]:
    """What `log_probabilities` has found, as lists."""
    return [
        TokenLogprobs(logprob=logprob, rank=rank, top=tuple(zip(ids, values, strict=True)))
        for logprob, rank, ids, values in zip(*found, strict=True)
    ]


def _draw(logits: Tensor, rows: Sequence[SampleRow], vocab_size: int) -> Tensor:
    logits_rows, temperature, seeds, positions, choices = to_device(pack_keys(rows), logits.device)
    return sample(
        logits,
        logits_rows=logits_rows,
        temperature=temperature,
        seeds=seeds,
        positions=positions,
        choices=choices,
        vocab_size=vocab_size,
        edits=pack_edits(rows, vocab_size, logits.device),
        filters=pack_filters(rows, logits.device),
    )


def _logprobs(logits: Tensor, logits_rows: Sequence[int], token_ids: Tensor, num_top: int, vocab_size: int) -> LogProbs:
    (rows,) = to_device([np.asarray(logits_rows, dtype=np.int32)], logits.device)
    return log_probabilities(logits, logits_rows=rows, token_ids=token_ids, num_top=num_top, vocab_size=vocab_size)
