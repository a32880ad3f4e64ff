"""A plain, slow sampler in float64, written from the definition: sorts everything, computes all noise."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.philox import NoiseKey, all_words, gumbel
from engine.sample import SampledToken, SampleRow
from engine.sampler import GREEDY_TEMPERATURE, Sampler
from pagewire.sampling import SamplingParams


@dataclass(frozen=True)
class Expected:
    """The token, the tokens it was drawn from (best first), and how close a filter's threshold was to another set."""

    token_id: int
    kept: list[int]
    slack: float


def make_row(params: SamplingParams | None = None, **fields: Any) -> SampleRow:
    """A SampleRow with defaults for what a test does not care about."""
    values: dict[str, Any] = {"logits_row": 0, "seed": 1, "choice": 0, "position": 10, **fields}
    return SampleRow(params=params or SamplingParams(), **values)


def sample_one(logits: Any, params: SamplingParams | None = None, **fields: Any) -> SampledToken:
    """Samples from a single row of logits."""
    table = torch.as_tensor(np.asarray(logits, dtype=np.float32))[None]
    return Sampler(table.shape[1]).sample(table, [make_row(params, **fields)])[0]


def adjusted(raw: NDArray[np.float32], row: SampleRow) -> NDArray[np.float32]:
    """Bias, suppression and penalties, token by token in float32."""
    out = raw.copy()
    params = row.params
    for token in range(len(out)):
        value = np.float32(out[token])
        if token in row.suppressed_token_ids:
            value = np.float32(-np.inf)
        value = value + np.float32(params.logit_bias.get(token, 0.0))
        seen = row.output_token_ids.count(token)
        if params.repetition_penalty != 1.0 and (seen or token in row.prompt_token_ids):
            penalty = np.float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        if seen:
            value = value - np.float32(params.frequency_penalty) * np.float32(seen)
            value = value - np.float32(params.presence_penalty)
        out[token] = value
    return out


def expected(raw: NDArray[np.float32], row: SampleRow) -> Expected:
    """What the sampler must return for one row."""
    params = row.params
    logits = adjusted(raw, row).astype(np.float64)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature < GREEDY_TEMPERATURE:
        return Expected(order[0], order[:1], math.inf)
    scaled = logits / params.temperature
    weights = np.exp(scaled - scaled.max())
    slack = math.inf
    if params.min_p > 0:
        slack = min(slack, min(abs(weight / params.min_p - 1.0) for weight in weights if weight > 0))
        order = [token for token in order if weights[token] >= params.min_p] or order[:1]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        reached = np.cumsum(weights[order])
        wanted = params.top_p * reached[-1]
        slack = min(slack, float(np.abs(reached / wanted - 1.0).min()))
        order = order[: int((reached < wanted).sum()) + 1]
    noisy = scaled + gumbel(all_words(NoiseKey(row.seed, row.position, row.choice), len(logits)))
    return Expected(max(sorted(order), key=lambda token: noisy[token]), order, slack)
