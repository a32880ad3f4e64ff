"""What rows ask of the sampler, as the arrays that `kernels/triton` takes, brought to the device in few copies."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from engine.sample import SampleRow
from engine.sampler import GREEDY_TEMPERATURE
from kernels.staging import Array, to_device
from kernels.triton.logit_edits import LogitEdits
from kernels.triton.token_filter import Filters
from pagewire.sampling import SamplingParams


def pack_keys(rows: Sequence[SampleRow]) -> list[Array]:
    """logits_rows int32, temperature float32, seeds, positions, choices int64, each [S]."""
    seeds = np.asarray([row.seed % 2**64 for row in rows], dtype=np.uint64).view(np.int64)
    return [
        np.asarray([row.logits_row for row in rows], dtype=np.int32),
        np.asarray([row.params.temperature for row in rows], dtype=np.float32),
        seeds,
        np.asarray([row.position for row in rows], dtype=np.int64),
        np.asarray([row.choice for row in rows], dtype=np.int64),
    ]


def filter_arrays(params: Sequence[SamplingParams]) -> list[Array]:
    """top_k int32, top_p and min_p_depth float64, as `Filters` has them."""
    depths = [each.temperature * math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params]
    return [
        np.asarray([each.top_k for each in params], dtype=np.int32),
        np.asarray([each.top_p for each in params], dtype=np.float64),
        np.asarray(depths, dtype=np.float64),
    ]


def pack_filters(rows: Sequence[SampleRow], device: torch.device) -> Filters | None:
    """The rows' min-p, top-k and top-p; None if no row that draws at random has any."""
    params = [row.params for row in rows]
    if all(
        each.temperature < GREEDY_TEMPERATURE or (each.top_k <= 0 and each.top_p >= 1.0 and each.min_p <= 0.0)
        for each in params
    ):
        return None
    return Filters(*to_device(filter_arrays(params), device))


def pack_edits(rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> LogitEdits | None:
    """The rows' masks, suppressed tokens, bias and penalties; None if no row has any."""
    named = [_named(row, vocab_size) for row in rows]
    masked = any(row.allowed is not None for row in rows)
    if not (masked or any(named)):
        return None
    edits = [edit for each in named for edit in each]
    starts = np.cumsum([0, *(len(each) for each in named)])
    arrays: list[Array] = [
        np.asarray(starts, dtype=np.int32),
        np.asarray([token_id for token_id, _, _, _ in edits], dtype=np.int32),
        np.asarray([bias for _, bias, _, _ in edits], dtype=np.float32),
        np.asarray([seen for _, _, seen, _ in edits], dtype=np.int32),
        np.asarray([count for _, _, _, count in edits], dtype=np.int32),
        np.asarray([row.params.repetition_penalty for row in rows], dtype=np.float32),
        np.asarray([row.params.frequency_penalty for row in rows], dtype=np.float32),
        np.asarray([row.params.presence_penalty for row in rows], dtype=np.float32),
    ]
    if masked:
        arrays.append(_allowed_words(rows, vocab_size))
    placed = to_device(arrays, device)
    return LogitEdits(
        starts=placed[0],
        most=max(len(each) for each in named),
        token_ids=placed[1],
        bias=placed[2],
        seen=placed[3],
        counts=placed[4],
        repetition=placed[5],
        frequency=placed[6],
        presence=placed[7],
        allowed=placed[8] if masked else None,
    )


def needs_edits(row: SampleRow) -> bool:
    """Its logits are changed before the draw."""
    params = row.params
    return bool(row.allowed is not None or row.suppressed_token_ids or params.logit_bias or params.has_penalties)


def _allowed_words(rows: Sequence[SampleRow], vocab_size: int) -> Array:
    """int32 [S, ceil(V / 32)]."""
    bits = np.zeros((len(rows), -(-vocab_size // 32) * 32), dtype=np.bool_)
    for sample_index, row in enumerate(rows):
        bits[sample_index, :vocab_size] = True if row.allowed is None else row.allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


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
