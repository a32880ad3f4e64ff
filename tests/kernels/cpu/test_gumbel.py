"""The draw's contenders: what the exact scores say is among them, and the sampler draws the same token with them."""

import numpy as np
import pytest
import torch

from engine.candidates import Candidates
from engine.philox import MAX_GUMBEL, NoiseKey, all_words, gumbel
from engine.sampler import Sampler, draw
from kernels.cpu.native import NativeKernels
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import make_row
from tests.kernels.cpu.harness import case

RNG = np.random.default_rng(7)
SHAPES = [
    np.zeros(1), np.array([-np.inf, 3.0]), np.zeros(63), RNG.normal(size=64), RNG.normal(size=65) * 9,
    np.arange(5000.0) / 100, -np.arange(4999.0) / 100, RNG.normal(size=70_001) * 4,
    np.where(RNG.random(33_000) < 0.999, -np.inf, RNG.normal(size=33_000)), RNG.normal(size=300) * 1e30,
]  # fmt: skip
KEYS = [NoiseKey(0, 0, 0), NoiseKey(2**64 - 1, 2**32 - 1, 63), NoiseKey(1 << 32, 17, 3, 5), NoiseKey(12345, 678, 9)]


def exact(logits: np.ndarray, ids: np.ndarray, temperature: float, key: NoiseKey) -> np.ndarray:
    """The scores in float64, of every candidate."""
    return logits.astype(np.float64) / temperature + gumbel(all_words(key, int(ids[-1]) + 1))[ids]


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 2.0, 100.0])
def test_all_near_the_best_are_found_and_nothing_else(native: NativeKernels, temperature: float) -> None:
    for number, shape in enumerate(SHAPES):
        logits = shape.astype(np.float32)
        gaps = np.cumsum(RNG.integers(1, 4, size=len(logits)))
        for key, ids in zip(KEYS, (None, gaps, None, gaps), strict=True):
            scores = exact(logits, np.arange(len(logits)) if ids is None else ids, temperature, key)
            found = native.contenders(logits, ids, temperature, key)
            with case(number, temperature, key):
                assert found is not None
                best, slack = scores.max(), 1e-15 * abs(scores.max())
                assert set(np.flatnonzero(scores >= best - 0.8e-4)) <= set(found)
                assert set(found) <= set(np.flatnonzero(scores >= best - 1.2e-4 - 2 * slack))
                assert list(found) == sorted(found)


def test_a_draw_is_the_same_with_them_and_without(native: NativeKernels) -> None:
    for seed in range(200):
        logits = (RNG.normal(size=3000) * RNG.choice([0.0, 1.0, 8.0])).astype(np.float32)
        key = NoiseKey(seed * 7919, seed, seed % 5)
        for candidates in (Candidates(logits), Candidates(logits[::7].copy(), np.arange(0, 3000, 7))):
            assert draw(candidates, 0.8, key, native.contenders) == draw(candidates, 0.8, key)


def test_too_many_near_the_best_are_left_to_the_sampler(native: NativeKernels) -> None:
    """A logit so large that no noise changes its score: all are equal, and the lowest id wins."""
    logits = np.full(40_000, 1e30, dtype=np.float32)
    assert native.contenders(logits, None, 1.0, KEYS[0]) is None
    token = Sampler(40_000, native.contenders).sample(torch.from_numpy(logits)[None], [make_row(SamplingParams())])[0]
    assert token.token_id == 0


def test_a_thread_that_gives_up_is_left_out_only_if_nothing_of_its_can_win(native: NativeKernels) -> None:
    """One slice is full of equal huge scores, so that it isn't looked through; the best of all may be behind them."""
    logits = np.full(70_001, -1e30, dtype=np.float32)
    logits[5] = 10.0
    for last, winner in ((-1e30, 5), (50.0, 70_000)):
        logits[-1] = last
        assert draw(Candidates(logits), 1.0, KEYS[0], native.contenders) == winner
        found = native.contenders(logits, None, 1.0, KEYS[0])
        assert found is None if winner == 70_000 else list(found) == [5]


def test_no_noise_is_larger_than_what_is_skipped_by() -> None:
    assert MAX_GUMBEL < 22.88
