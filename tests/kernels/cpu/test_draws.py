"""Draws from whole rows: the filters keep what engine/candidates.py keeps, and who can win is among the contenders."""

import math

import numpy as np
import pytest

from engine.candidates import Candidates, filter_candidates
from engine.philox import MAX_GUMBEL, NoiseKey, all_words, gumbel
from engine.sampler import decide, draw
from kernels.cpu.draws import Draw, State
from kernels.cpu.native import NativeKernels
from pagewire.sampling import SamplingParams
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
        each = [(key, ids) for key, ids in zip(KEYS, (None, gaps, None, gaps), strict=True)]
        drawn = native.draw([Draw(logits, ids, temperature, key) for key, ids in each])
        for (key, ids), one in zip(each, drawn, strict=True):
            scores = exact(logits, np.arange(len(logits)) if ids is None else ids, temperature, key)
            found = one.contenders
            with case(number, temperature, key):
                assert one.state is State.DRAWN
                assert one.likeliest == logits.argmax()
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
            (found,) = native.draw([Draw(candidates.logits, candidates.ids, 0.8, key)])
            assert found.contenders is not None
            assert decide(candidates, found.contenders, 0.8, key) == draw(candidates, 0.8, key)


def test_too_many_near_the_best_are_said_to_be(native: NativeKernels) -> None:
    """Logits so large that no noise changes their scores: all are equal."""
    logits = np.full(40_000, 1e30, dtype=np.float32)
    (found,) = native.draw([Draw(logits, temperature=1.0, key=KEYS[0])])
    assert found.contenders is None


def test_what_is_not_finite(native: NativeKernels) -> None:
    good = RNG.normal(size=100).astype(np.float32)
    rows = [np.full(100, -np.inf, np.float32), good.copy(), good.copy(), good]
    rows[1][99], rows[2][3] = np.nan, np.inf
    states = [found.state for found in native.draw([Draw(row, temperature=1.0) for row in rows])]
    assert states == [State.NOT_FINITE] * 3 + [State.DRAWN]


def test_no_noise_is_larger_than_what_is_skipped_by() -> None:
    assert MAX_GUMBEL < 22.88


def headed(size: int, seed: int) -> np.ndarray:
    """Logits with a head that stands out, as a language model's do; some are equal."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal(size) * 2 - 6
    logits[random.permutation(size)[:60]] += np.linspace(18, 2, min(60, size))
    logits[random.permutation(size)[: size // 3]] = np.round(logits[: size // 3] * 4) / 4
    return logits


FILTERED = [
    headed(50_000, 1), headed(151_936, 2), headed(97, 3), RNG.normal(size=20_000) * 0.6, np.zeros(3000),
    np.repeat(np.arange(40.0), 77) / 8, np.where(RNG.random(5000) < 0.9, -np.inf, headed(5000, 4)),
    np.array([-0.0, 0.0, 0.0, -1.0]), -np.abs(RNG.normal(size=2500)) * 1e30,
]  # fmt: skip
FILTERS = [
    {"top_k": k} for k in (1, 2, 50, 256, 257, 3000, 10**6)
] + [
    {"top_p": p} for p in (1e-30, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999)
] + [
    {"min_p": 0.1}, {"min_p": 1e-4}, {"min_p": 1.0}, {"min_p": 0.01, "top_k": 20}, {"top_k": 40, "top_p": 0.8},
    {"min_p": 1e-3, "top_k": 400, "top_p": 0.97},
]  # fmt: skip


def test_filters_keep_what_the_reference_keeps(native: NativeKernels) -> None:
    """Told by draws, which are those from the reference's set. Few are unsure."""
    num_unsure = num_all = 0
    for number, shape in enumerate(FILTERED):
        logits = shape.astype(np.float32)
        for filters in FILTERS:
            for temperature in (0.7, 1.0):
                params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
                kept = filter_candidates(logits, params)
                powers = np.exp((logits - logits.max()) / np.float32(temperature))
                depth = temperature * math.log(params.min_p) if params.min_p else -math.inf
                each = [
                    Draw(logits, None, temperature, NoiseKey(seed, 5, 0), depth, params.top_k, params.top_p, own)
                    for seed, own in ((1, None), (2, None), (3, powers))
                ]
                for one, found in zip(each, native.draw(each), strict=True):
                    num_all += 1
                    num_unsure += found.state is State.UNSURE
                    if found.state is State.UNSURE:
                        continue
                    with case(number, filters, temperature):
                        assert found.contenders is not None
                        key = NoiseKey(*one.key)
                        assert decide(Candidates(logits), found.contenders, temperature, key) == draw(
                            kept, temperature, key
                        )
    assert num_unsure < num_all // 10  # where noughts are all there is, and where sums are exactly top_p


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_edge_of_a_filter_is_the_references(native: NativeKernels, filters: dict[str, float]) -> None:
    """With a large temperature noise decides alone, and so draws with many keys find every token that was kept."""
    logits = (np.round(RNG.normal(size=40) * 4) / 4).astype(np.float32)
    params = SamplingParams(temperature=8.0, **filters)  # type: ignore[arg-type]
    kept = filter_candidates(logits, params)
    depth = params.temperature * math.log(params.min_p) if params.min_p else -math.inf
    draws = [Draw(logits, None, 8.0, NoiseKey(seed, 0, 0), depth, params.top_k, params.top_p) for seed in range(2000)]
    found = [each.contenders for each in native.draw(draws) if each.state is State.DRAWN]
    seen = {int(index) for each in found if each is not None for index in each}
    assert not found or seen == set(kept.token_ids(np.arange(len(kept.logits))).tolist())
