"""Draws the tokens of `engine.sampler` with the native kernels, most of them while the logits are being made.

    in passing   greedy, with or without log-probabilities; temperature alone; top-k (with top-p, min-p). What decides
                 is found chunk by chunk beside the output matrix, and the row of logits is never written
    whole rows   everything else: penalties, bias, what may not be drawn, top-p or min-p without top-k,
                 log-probabilities of drawn tokens

The kernels narrow a draw down to who can win it, to one token nearly always; `engine.sampler` decides between several.
So tokens are the same to the bit. Log-probabilities differ from numpy's in the last bits, but not from path to path.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.candidates import Candidates, Row
from engine.head_rows import HeadRows
from engine.logit_adjustment import adjust, is_adjusted
from engine.philox import NoiseKey
from engine.request import TokenLogprobs
from engine.sample import SampledToken, SampleRow
from engine.sampler import GREEDY_TEMPERATURE, decide, sample_row, token_logprobs
from kernels.cpu.draws import Draw, Drawn, State
from kernels.cpu.looks import MOST_TOP, Look, Seen
from pagewire.sampling import SamplingParams


class SamplingKernels(Protocol):
    """What of `kernels.cpu.native.NativeKernels` is used here."""

    def draw(self, each: Sequence[Draw]) -> list[Drawn]: ...
    def look(self, logits: NDArray[np.float32], num_columns: int, looks: Sequence[Look]) -> list[Seen]: ...
    def logits_looked_at(
        self, x: torch.Tensor, weight: Any, num_columns: int, looks: Sequence[Look], whole: Sequence[int]
    ) -> tuple[torch.Tensor, list[Seen]]: ...


class NativeSampler:
    """Same interface and results as `engine.sampler.Sampler`. Has no state."""

    def __init__(self, vocab_size: int, kernels: SamplingKernels) -> None:
        self.vocab_size = vocab_size
        self._kernels = kernels

    def sample_from(
        self, head: HeadRows, rows: Sequence[SampleRow], kept: Sequence[int]
    ) -> tuple[torch.Tensor, list[SampledToken]]:
        """See `engine.sampler.RowSampler`."""
        product = head.product()
        if product is None:
            logits = head.logits()
            return logits, self.sample(logits, rows)
        passing = [i for i, row in enumerate(rows) if _seen_in_passing(row)]
        others = [i for i, row in enumerate(rows) if not _seen_in_passing(row)]
        looks = [_look_of(rows[i]) for i in passing]
        whole = sorted({rows[i].logits_row for i in others} | set(kept))
        logits, seen = self._kernels.logits_looked_at(*product, self.vocab_size, looks, whole)
        tokens = dict(zip(passing, self._settle(head, [rows[i] for i in passing], seen), strict=True))
        tokens |= zip(others, self.sample(logits, [rows[i] for i in others]), strict=True)
        return logits, [tokens[i] for i in range(len(rows))]

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token per row from logits [R, V]; see `engine.sampler.Sampler.sample`."""
        table = self._table(logits)
        raws = [table[row.logits_row, : self.vocab_size] for row in rows]
        with np.errstate(over="ignore", invalid="ignore"):
            logits_of = [raw if row.error else adjust(raw, row) for raw, row in zip(raws, rows, strict=True)]
            token_ids = self._draw([Candidates(each) for each in logits_of], rows)
            for i, (raw, row) in enumerate(zip(raws, rows, strict=True)):
                if row.error or (logits_of[i] is not raw and not np.isfinite(raw.max())):
                    token_ids[i] = None
            asked = [row.params.logprobs for row in rows]
            looking = [
                i
                for i, token_id in enumerate(token_ids)
                if token_id is not None and asked[i] is not None and not rows[i].params.drawable_logprobs
            ]
            looks = self._logprobs(table, [(rows[i].logits_row, token_ids[i] or 0, asked[i] or 0) for i in looking])
            logprobs = dict(zip(looking, looks, strict=True))
            return [
                sample_row(raw, row)
                if token_id is None or row.params.drawable_logprobs
                else SampledToken(token_id, logprobs.get(i))
                for i, (raw, row, token_id) in enumerate(zip(raws, rows, token_ids, strict=True))
            ]

    def logprobs_of(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Those of `token_ids` [R], each by its row of logits [R, V]."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._logprobs(self._table(logits), [(i, token_id, num_top) for i, token_id in enumerate(token_ids)])

    def _table(self, logits: torch.Tensor) -> NDArray[np.float32]:
        table: NDArray[np.float32] = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
        return table if table.strides[1] == table.itemsize else np.ascontiguousarray(table)

    def _settle(self, head: HeadRows, rows: Sequence[SampleRow], seen: Sequence[Seen]) -> list[SampledToken]:
        """Tokens of rows that were seen in passing. One that takes another look is computed again, to the same bits."""
        listed = [row.params.top_k > 0 and not _is_greedy(row.params) for row in rows]
        lists = [i for i, is_listed in enumerate(listed) if is_listed and _is_finite(seen[i])]
        drawn = self._draw([_by_id(seen[i]) for i in lists], [rows[i] for i in lists], filtered=True)
        of_lists = dict(zip(lists, drawn, strict=True))
        tokens = []
        for i, (row, own) in enumerate(zip(rows, seen, strict=True)):
            token_id = of_lists.get(i) if listed[i] else _token_id(row.params, own)
            num_top = min(row.params.logprobs or 0, self.vocab_size)
            if token_id is None or not _is_finite(own) or len(own.top_ids) < num_top:
                tokens.append(self._again(head, row))
            elif row.params.logprobs is None:
                tokens.append(SampledToken(token_id))
            else:
                tokens.append(SampledToken(token_id, _logprobs(own, float(own.top_values[0]), 1, num_top)))
        return tokens

    def _again(self, head: HeadRows, row: SampleRow) -> SampledToken:
        adapters = None  # those of the head exclude being seen in passing
        alone = HeadRows(head.model, head.hidden[row.logits_row : row.logits_row + 1], adapters).logits()
        with np.errstate(over="ignore", invalid="ignore"):
            return sample_row(self._table(alone)[0, : self.vocab_size], row)

    def _draw(
        self, each: Sequence[Candidates], rows: Sequence[SampleRow], *, filtered: bool = False
    ) -> list[int | None]:
        """A token of each row's candidates (`filtered`: by top-k already); None is left to `sample_row`."""
        draws = [
            _draw_of(candidates, row.params, _key(row), filtered=filtered)
            for candidates, row in zip(each, rows, strict=True)
        ]
        drawn = self._kernels.draw(draws) if draws else []
        unsure = [i for i, found in enumerate(drawn) if found.state is State.UNSURE]
        if unsure:
            again = self._kernels.draw([_with_numpys_powers(draws[i], drawn[i].likeliest) for i in unsure])
            for i, found in zip(unsure, again, strict=True):
                drawn[i] = found
        return [
            _winner(candidates, row.params, _key(row), found)
            for candidates, row, found in zip(each, rows, drawn, strict=True)
        ]

    def _logprobs(self, table: NDArray[np.float32], asked: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs]:
        """For each (row of the table, token, how many of the likeliest)."""
        looks = [
            Look(row, num_top=max(1, min(num_top, MOST_TOP)), wants_total=True, token=token_id)
            for row, token_id, num_top in asked
        ]
        seen = self._kernels.look(table, self.vocab_size, looks) if looks else []
        return [
            token_logprobs(table[row, : self.vocab_size], token_id, num_top)
            if len(own.top_ids) < min(num_top, self.vocab_size) or own.is_broken
            else _logprobs(own, float(table[row, token_id]), own.rank, num_top)
            for (row, token_id, num_top), own in zip(asked, seen, strict=True)
        ]


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_TEMPERATURE


def _seen_in_passing(row: SampleRow) -> bool:
    params = row.params
    if row.error is not None or is_adjusted(row) or params.drawable_logprobs:
        return False
    if _is_greedy(params):
        return (params.logprobs or 0) <= MOST_TOP
    if params.logprobs is not None:
        return False  # the drawn token's rank takes another look
    return params.top_k <= MOST_TOP if params.top_k > 0 else params.top_p >= 1.0 and params.min_p <= 0.0


def _look_of(row: SampleRow) -> Look:
    params = row.params
    if _is_greedy(params):
        return Look(row.logits_row, num_top=max(1, params.logprobs or 0), wants_total=params.logprobs is not None)
    if params.top_k > 0:
        return Look(row.logits_row, num_top=params.top_k)
    return Look(row.logits_row, temperature=params.temperature, key=_key(row))


def _key(row: SampleRow) -> NoiseKey:
    return NoiseKey(row.seed, row.position, row.choice)


def _is_finite(seen: Seen) -> bool:
    return not seen.is_broken and len(seen.top_ids) > 0 and math.isfinite(seen.top_values[0])


def _token_id(params: SamplingParams, seen: Seen) -> int | None:
    if not _is_finite(seen):
        return None
    if _is_greedy(params):
        return int(seen.top_ids[0])
    one = seen.contenders is not None and len(seen.contenders) == 1
    return int(seen.contenders[0]) if one and seen.contenders is not None else None


def _by_id(seen: Seen) -> Candidates:
    order = seen.top_ids.argsort()
    return Candidates(seen.top_values[order], seen.top_ids[order])


def _logprobs(seen: Seen, logit: float, rank: int, num_top: int) -> TokenLogprobs:
    ids, values = seen.top_ids[:num_top].tolist(), seen.top_values[:num_top].tolist()
    top = tuple((token_id, value - seen.log_total) for token_id, value in zip(ids, values, strict=True))
    return TokenLogprobs(logprob=logit - seen.log_total, rank=rank, top=top)


def _draw_of(candidates: Candidates, params: SamplingParams, key: NoiseKey, *, filtered: bool) -> Draw:
    if _is_greedy(params):
        return Draw(candidates.logits, candidates.ids)
    return Draw(
        candidates.logits,
        candidates.ids,
        temperature=params.temperature,
        key=key,
        depth=params.temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        top_k=0 if filtered else params.top_k,
        top_p=params.top_p,
    )


def _with_numpys_powers(draw: Draw, likeliest: int) -> Draw:
    """The powers that `engine.candidates` computes: sums of those are compared far more sharply."""
    logits: Row = draw.logits
    powers = np.exp((logits - logits[likeliest]) / np.float32(draw.temperature))
    return Draw(
        *(logits, draw.ids, draw.temperature, draw.key, draw.depth, draw.top_k, draw.top_p),
        powers=powers,
    )


def _winner(candidates: Candidates, params: SamplingParams, key: NoiseKey, found: Drawn) -> int | None:
    if found.state is not State.DRAWN:
        return None
    if _is_greedy(params):
        return int(candidates.token_ids(np.array([found.likeliest]))[0])
    return None if found.contenders is None else decide(candidates, found.contenders, params.temperature, key)
