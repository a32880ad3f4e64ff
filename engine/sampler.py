"""Draws one token per row: greedy, or Gumbel-max with keyed noise over the filtered tokens.

Order, as vLLM's: raw log-probabilities are taken; allowed_token_ids, bad_words, grammar and min_tokens; logit bias;
repetition, frequency and presence penalties; greedy stops here; temperature; min-p; top-k; top-p;
argmax(logits / T + gumbel). Rows are processed one by one in numpy, so a row's token and log-probabilities do not
depend on its neighbours (DESIGN §4). `engine.native_sampler` and `engine.device_sampler` draw the same tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine import philox
from engine.candidates import Candidates, Ids, Row, filter_candidates, likeliest
from engine.head_rows import HeadRows
from engine.logit_adjustment import adjust, drawable
from engine.philox import NoiseKey
from engine.request import TokenLogprobs
from engine.sample import SampledToken, SampleRow

__all__ = ["RowSampler", "SampleRow", "SampledToken", "Sampler"]

GREEDY_TEMPERATURE = 1e-5  # below this a temperature means greedy, as in vLLM

_FIRST_DEPTH = 4.0  # first look: tokens this far (in nats) below the maximum ...
_MOST_FIRST = 1024  # ... but not more than this; any of them would do
_ROUNDING = 1e-6  # relative slack: the bound must hold in spite of rounding


class RowSampler(Protocol):
    """What the runner asks of a sampler: this file's, or another one for the kernel set."""

    def sample_from(
        self, head: HeadRows, rows: Sequence[SampleRow], kept: Sequence[int]
    ) -> tuple[torch.Tensor, list[SampledToken]]:
        """One token per row, and the logits [R, V], of which only the rows `kept` need be there."""
        ...

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]: ...
    def logprobs_of(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]: ...


class Sampler:
    """Draws tokens from logits. Has no state: the same row gives the same token, always."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample_from(
        self, head: HeadRows, rows: Sequence[SampleRow], kept: Sequence[int]
    ) -> tuple[torch.Tensor, list[SampledToken]]:
        """See `RowSampler`."""
        logits = head.logits()
        return logits, self.sample(logits, rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token per row from logits [R, V]; several rows may share a `logits_row`.

        Columns beyond `vocab_size` (padding of the output matrix) are never drawn. Broken logits (NaN, inf, nothing
        left to draw) give a SampledToken with `error` for that row alone.
        """
        table = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is checked, row by row
            return [sample_row(table[row.logits_row, : self.vocab_size], row) for row in rows]

    def logprobs_of(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Those of `token_ids` [R], each by its row of logits [R, V]."""
        table = logits.detach().to(device="cpu", dtype=torch.float32).numpy()[:, : self.vocab_size]
        with np.errstate(over="ignore", invalid="ignore"):
            return [token_logprobs(row, token_id, num_top) for row, token_id in zip(table, token_ids, strict=True)]


def sample_row(raw: Row, row: SampleRow) -> SampledToken:
    """Draws from one row of model logits [V]."""
    if row.error is not None:
        return SampledToken(-1, error=row.error, field=_blamed(row))
    likeliest_id = int(raw.argmax())  # the first NaN, if there is one
    if not np.isfinite(raw[likeliest_id]):
        return SampledToken(-1, error=not_finite(row.position))
    logits = adjust(raw, row)
    if logits is not raw:
        unbound_id, likeliest_id = likeliest_id, int(logits.argmax())
        if not np.isfinite(logits[likeliest_id]):
            if row.params.drawable_logprobs:
                # A beam that ends here; others may go on. The list says so, the token means nothing.
                return SampledToken(unbound_id, replace(token_logprobs(raw, unbound_id, 0), top=()))
            message = f"no token with a finite logit is left to draw at position {row.position}"
            return SampledToken(-1, error=message, field=_blamed(row))
    if row.params.temperature < GREEDY_TEMPERATURE:
        token_id = likeliest_id
    else:
        candidates = filter_candidates(logits, row.params)
        key = NoiseKey(row.seed, row.position, row.choice)
        token_id = draw(candidates, row.params.temperature, key)
    wanted = row.params.logprobs
    if wanted is None:
        return SampledToken(token_id)
    found = token_logprobs(raw, token_id, 0 if row.params.drawable_logprobs else wanted)
    if row.params.drawable_logprobs:
        found = replace(found, top=_drawable_top(raw, row, wanted))
    return SampledToken(token_id, found)


def not_finite(position: int) -> str:
    """Why no token could be drawn at all."""
    return f"the model's logits at position {position} are not finite"


def _blamed(row: SampleRow) -> str:
    """The parameter that leaves nothing to draw although the model's logits are finite."""
    params = row.params
    if params.structured_output is not None:
        return f"params.structured_output.{params.structured_output.kind}"
    if params.allowed_token_ids:
        return "params.allowed_token_ids"
    if params.bad_words_token_ids:
        return "params.bad_words"
    return "params.min_tokens" if row.suppressed_token_ids else "params.logit_bias"


def draw(candidates: Candidates, temperature: float, key: NoiseKey) -> int:
    """argmax over the candidates of logit / T + gumbel(key, token); among equals the lowest id."""
    return decide(candidates, bounded_contenders(candidates, temperature, key), temperature, key)


def decide(candidates: Candidates, index: Ids, temperature: float, key: NoiseKey) -> int:
    """The draw's token, which is one of the candidates at `index`, ascending."""
    if len(index) == 1:
        return int(candidates.token_ids(index)[0])
    return int(candidates.token_ids(index)[_perturbed(candidates, index, temperature, key).argmax()])


def bounded_contenders(candidates: Candidates, temperature: float, key: NoiseKey) -> Ids:
    """What may win, by bounds alone: a token more than MAX_GUMBEL below the best score so far can't."""
    logits = candidates.logits
    first = np.flatnonzero(logits >= logits.max() - np.float32(_FIRST_DEPTH * temperature))[:_MOST_FIRST]
    best = float(_perturbed(candidates, first, temperature, key).max())
    floor = (best - philox.MAX_GUMBEL - _ROUNDING * max(1.0, abs(best))) * temperature
    return np.flatnonzero(logits >= np.nextafter(np.float32(floor), np.float32(-np.inf)))


def _perturbed(candidates: Candidates, index: Ids, temperature: float, key: NoiseKey) -> NDArray[np.float64]:
    """logit / T + gumbel of the candidates at `index`."""
    scores: NDArray[np.float64] = candidates.logits[index].astype(np.float64) / temperature
    return scores + _noise(candidates.token_ids(index), key)


def _noise(token_ids: Ids, key: NoiseKey) -> NDArray[np.float64]:
    """Gumbel noise of the tokens; ids ascend. Dense sets use all four words of each Philox call."""
    vocab_size = int(token_ids[-1]) + 1
    if 4 * len(token_ids) < vocab_size:
        return philox.gumbel(philox.words(key, token_ids))
    return philox.gumbel(philox.all_words(key, vocab_size)[token_ids])


def token_logprobs(raw: Row, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the model itself: before bias, penalties, temperature and filters.

    The rank counts tokens in the order of `top`: (logit descending, id ascending), so `top[rank - 1]` is the token.
    """
    log_total = _log_total(raw)
    logit = raw[token_id]
    rank = 1 + int(np.count_nonzero(raw > logit)) + int(np.count_nonzero(raw[:token_id] == logit))
    top = tuple((i, float(raw[i]) - log_total) for i in likeliest(raw, num_top)) if num_top > 0 else ()
    return TokenLogprobs(logprob=float(logit) - log_total, rank=rank, top=top)


def _drawable_top(raw: Row, row: SampleRow, num_top: int) -> tuple[tuple[int, float], ...]:
    """The model's own log-probabilities of the likeliest tokens that may be drawn; fewer, if fewer may."""
    logits, log_total = drawable(raw, row), _log_total(raw)
    return tuple((i, float(raw[i]) - log_total) for i in likeliest(logits, num_top) if np.isfinite(logits[i]))


def _log_total(raw: Row) -> float:
    peak = raw.max()
    return float(peak) + float(np.log(np.exp(raw - peak).sum(dtype=np.float64)))
