"""min-p, top-k, top-p: which tokens stay, at the edges and on large vocabularies."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.candidates import filter_candidates, likeliest
from engine.philox import NoiseKey, all_words, gumbel
from engine.sampler import draw
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import expected, make_row

LARGE = 50_000


def _kept(logits: NDArray[np.float32] | list[float], params: SamplingParams) -> list[int]:
    found = filter_candidates(np.asarray(logits, dtype=np.float32), params)
    return found.token_ids(np.arange(len(found.logits))).tolist()


def _shaped(seed: int, vocab: int = LARGE) -> NDArray[np.float32]:
    """Logits with a head that stands out, as a language model's do."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal(vocab) * 2 - 6
    logits[random.permutation(vocab)[:60]] += np.linspace(18, 2, 60)
    return logits.astype(np.float32)


PROBABILITIES = [0.1, 0.4, 0.2, 0.25, 0.05]
LOGITS = [math.log(p) for p in PROBABILITIES]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), [0, 1, 2, 3, 4]),
        (SamplingParams(top_k=2), [1, 3]),
        (SamplingParams(top_k=5), [0, 1, 2, 3, 4]),
        (SamplingParams(top_k=2**31 - 1), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=0.39), [1]),
        (SamplingParams(top_p=0.41), [1, 3]),
        (SamplingParams(top_p=0.66), [1, 2, 3]),
        (SamplingParams(top_p=1e-30), [1]),
        (SamplingParams(top_p=0.96), [0, 1, 2, 3, 4]),
        (SamplingParams(min_p=0.45), [1, 2, 3]),
        (SamplingParams(min_p=1.0), [1]),
        (SamplingParams(min_p=1e-300), [0, 1, 2, 3, 4]),
        # top-p works on what top-k left: 0.4 / 0.65 = 0.62 reaches 0.6.
        (SamplingParams(top_k=2, top_p=0.6), [1]),
        # ... and on what min-p left: 0.65 / 0.85 = 0.76 reaches 0.75, 0.65 alone does not.
        (SamplingParams(min_p=0.45, top_p=0.75), [1, 3]),
    ],
)
def test_filters_leave_exactly_these_tokens(params: SamplingParams, kept: list[int]) -> None:
    assert _kept(LOGITS, params) == kept


def test_temperature_widens_top_p_but_not_top_k() -> None:
    assert _kept(LOGITS, SamplingParams(temperature=10.0, top_p=0.66)) == [0, 1, 2, 3]
    assert _kept(LOGITS, SamplingParams(temperature=10.0, top_k=2)) == [1, 3]


def test_equal_logits_stay_in_order_of_their_ids() -> None:
    assert _kept([1.0] * 8, SamplingParams(top_k=3)) == [0, 1, 2]
    assert _kept([1.0] * 8, SamplingParams(top_p=0.5)) == [0, 1, 2, 3]
    assert _kept([0.0, 2.0, 1.0, 1.0, 1.0], SamplingParams(top_k=3)) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=50),
        SamplingParams(top_k=3000),
        SamplingParams(top_k=LARGE - 1),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.99),
        SamplingParams(min_p=0.01),
        SamplingParams(temperature=0.6, top_k=100, top_p=0.9, min_p=0.001),
        SamplingParams(temperature=2.5, top_p=0.9),
    ],
)
def test_large_vocabularies_keep_what_a_full_sort_keeps(seed: int, params: SamplingParams) -> None:
    logits = _shaped(seed)
    wanted = expected(logits, make_row(params))
    assert wanted.slack > 1e-7
    assert _kept(logits, params) == sorted(wanted.kept)


def test_a_top_p_of_almost_1_keeps_almost_everything() -> None:
    """Where thousands of tokens share the last millionths, float32 may cut a few tokens earlier or later."""
    logits = _shaped(0)
    wanted = expected(logits, make_row(SamplingParams(top_p=0.99999))).kept
    found = set(_kept(logits, SamplingParams(top_p=0.99999)))
    assert 1000 < len(wanted) < LARGE
    assert abs(len(found) - len(wanted)) <= len(wanted) // 1000
    longer = expected(logits, make_row(SamplingParams())).kept
    assert found == set(longer[: len(found)])


@pytest.mark.parametrize("count", [1, 20, 255, 257, LARGE])
def test_the_likeliest_tokens_come_best_first(count: int) -> None:
    logits = np.round(_shaped(1))  # many ties
    wanted = np.argsort(-logits, kind="stable")[:count]
    assert likeliest(logits, count) == wanted.tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_skipping_noise_never_changes_the_token(temperature: float) -> None:
    """`draw` computes noise only for tokens that can win; this computes it for all 50 000."""
    for position in range(20):
        logits = _shaped(position)
        key = NoiseKey(seed=11, position=position, choice=2)
        noisy = logits.astype(np.float64) / temperature + gumbel(all_words(key, LARGE))
        assert draw(filter_candidates(logits, SamplingParams()), temperature, key) == int(noisy.argmax())


def test_a_token_far_below_the_maximum_can_still_win() -> None:
    """The bound that skips noise must be the noise's true bound: find real draws of unlikely tokens."""
    logits = np.zeros(LARGE, dtype=np.float32)
    logits[0] = 9.0  # about 14 % of the mass, the others are 8 000 times less likely each
    found = [draw(filter_candidates(logits, SamplingParams()), 1.0, NoiseKey(seed, 1, 0)) for seed in range(60)]
    assert 0 < found.count(0) < 25
    assert len(set(found)) > 30
