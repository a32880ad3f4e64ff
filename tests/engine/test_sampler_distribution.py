"""Sampled frequencies against the softmax they must follow (chi-square, fixed seeds)."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from engine.sampler import sample_row
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import expected, make_row

NUM_DRAWS = 2500
VOCAB = 40
LOGITS = (np.random.default_rng(3).standard_normal(VOCAB) * 1.5).astype(np.float32)


def _draws(params: SamplingParams, *, vary: str, logits: NDArray[np.float32] = LOGITS) -> NDArray[np.int64]:
    """How often each token was drawn while one part of the noise key runs through its values."""
    counts = np.zeros(len(logits), dtype=np.int64)
    for value in range(NUM_DRAWS):
        counts[sample_row(logits, make_row(params, **{"seed": 5, "position": 9, vary: value})).token_id] += 1
    return counts


def _p_value(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Chi-square; tokens expected fewer than five times are counted together. A forbidden token fails at once."""
    assert counts[probabilities == 0].sum() == 0
    often = probabilities * NUM_DRAWS >= 5
    observed, wanted = list(counts[often]), list(probabilities[often] * NUM_DRAWS)
    if (~often).any() and probabilities[~often].sum() > 0:
        observed.append(counts[~often].sum())
        wanted.append(probabilities[~often].sum() * NUM_DRAWS)
    if len(observed) == 1:
        return 1.0
    return float(chisquare(observed, wanted).pvalue)


def _softmax(params: SamplingParams, logits: NDArray[np.float32] = LOGITS) -> NDArray[np.float64]:
    kept = expected(logits, make_row(params)).kept
    weights = np.zeros(len(logits))
    weights[kept] = np.exp(logits[kept].astype(np.float64) / params.temperature)
    return weights / weights.sum()


CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=7),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.03),
}


@pytest.mark.parametrize("vary", ["position", "seed", "choice"])
def test_frequencies_follow_the_softmax_whatever_part_of_the_key_changes(vary: str) -> None:
    assert _p_value(_draws(CASES["plain"], vary=vary), _softmax(CASES["plain"])) > 1e-3


@pytest.mark.parametrize("name", list(CASES))
def test_frequencies_follow_the_filtered_softmax(name: str) -> None:
    params = CASES[name]
    assert 1 < len(expected(LOGITS, make_row(params)).kept) <= VOCAB
    assert _p_value(_draws(params, vary="position"), _softmax(params)) > 1e-3


def test_the_chi_square_would_notice_a_temperature_that_is_a_fifth_off() -> None:
    counts = _draws(SamplingParams(temperature=1.2), vary="position")
    assert _p_value(counts, _softmax(SamplingParams(temperature=1.0))) < 1e-6


def test_draws_at_neighbouring_positions_are_independent() -> None:
    """Pairs (token at p, token at p + 1) of a fair coin fall equally into four cells."""
    coin = np.zeros(2, dtype=np.float32)
    flips = [sample_row(coin, make_row(position=position)).token_id for position in range(NUM_DRAWS)]
    pairs = np.bincount([2 * a + b for a, b in zip(flips[::2], flips[1::2], strict=True)], minlength=4)
    assert chisquare(pairs).pvalue > 1e-3
