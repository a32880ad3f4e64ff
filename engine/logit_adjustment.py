"""Changes to one row of logits before filters: bias, suppression, penalties, in vLLM's order."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.sample import SampleRow

Row = NDArray[np.float32]


def adjust(raw: Row, row: SampleRow) -> Row:
    """The logits [V] that sampling starts from: `raw` itself when nothing is asked for, else a changed copy.

    What may not be drawn, logit bias, then repetition, frequency and presence penalties. A token that may not be drawn
    stays at -inf whatever is added to it.
    """
    if not is_adjusted(row):
        return raw
    params = row.params
    logits = drawable(raw, row)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
        logits[ids] += np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(params.logit_bias))
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits, row.prompt_token_ids, row.output_token_ids, np.float32(params.repetition_penalty))
    if row.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        seen, counts = np.unique(np.asarray(row.output_token_ids, dtype=np.int64), return_counts=True)
        logits[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[seen] -= np.float32(params.presence_penalty)
    return logits


def is_adjusted(row: SampleRow) -> bool:
    """Whether anything is asked for that changes the logits."""
    return bool(row.suppressed_token_ids or row.params.logit_bias or row.allowed is not None or _has_penalties(row))


def drawable(raw: Row, row: SampleRow) -> Row:
    """A copy of the logits [V] in which a token that may not be drawn has -inf."""
    logits: Row = raw.copy() if row.allowed is None else np.where(row.allowed, raw, np.float32(-np.inf))
    if row.suppressed_token_ids:
        suppressed = np.asarray(row.suppressed_token_ids, dtype=np.int64)
        logits[suppressed[suppressed < len(logits)]] = -np.inf  # a model's config may name ids it does not have
    return logits


def _has_penalties(row: SampleRow) -> bool:
    params = row.params
    if params.repetition_penalty != 1.0:
        return True
    return bool(row.output_token_ids) and bool(params.frequency_penalty or params.presence_penalty)


def _penalize_repetition(
    logits: Row, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], penalty: np.float32
) -> None:
    """Moves tokens of prompt and output away from being likely: positive logits are divided, others multiplied."""
    seen = np.unique(np.asarray([*prompt_token_ids, *output_token_ids], dtype=np.int64))
    found = logits[seen]
    logits[seen] = np.where(found > 0, found / penalty, found * penalty)
