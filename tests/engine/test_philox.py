"""The noise: published answers, golden vectors, and that it depends on its key and nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.philox import MAX_GUMBEL, NoiseKey, all_words, gumbel, philox4x32, uniform, words

GOLDEN = Path(__file__).parents[2] / "protos" / "pagewire" / "v1" / "philox.json"
VECTORS: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", VECTORS["known_answers"])
def test_philox_gives_the_published_random123_answers(case: dict[str, list[int]]) -> None:
    counter = tuple(np.array([word], dtype=np.uint64) for word in case["counter"])
    found = philox4x32(counter, tuple(case["key"]))
    assert [int(word[0]) for word in found] == case["output"]


@pytest.mark.parametrize("case", VECTORS["noise"])
def test_noise_equals_the_golden_vectors(case: dict[str, Any]) -> None:
    key = NoiseKey(int(case["seed"]), case["position"], case["choice"], case["domain"])
    raw = words(key, np.array(case["token_ids"]))
    assert raw.tolist() == case["words"]
    assert uniform(raw).tolist() == case["uniform"]
    assert gumbel(raw) == pytest.approx(case["gumbel"], abs=1e-11)


def test_a_token_takes_the_word_of_its_group_of_four() -> None:
    """Straight from the definition, without the code's vectorization."""
    key = NoiseKey(seed=0x0123456789ABCDEF, position=4097, choice=2)
    for token_id in (0, 1, 2, 3, 4, 9259, 262143):
        counter = tuple(np.array([word], dtype=np.uint64) for word in (token_id // 4, 4097, 2, 0))
        word = philox4x32(counter, (0x89ABCDEF, 0x01234567))[token_id % 4]
        assert words(key, np.array([token_id])).tolist() == [int(word[0])]


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 300, 16384 * 4 + 7])
def test_the_dense_path_equals_the_sparse_one(vocab_size: int) -> None:
    key = NoiseKey(seed=99, position=5, choice=1)
    assert np.array_equal(all_words(key, vocab_size), words(key, np.arange(vocab_size)))


def test_every_part_of_the_key_changes_the_noise() -> None:
    base = NoiseKey(seed=7, position=8, choice=0)
    keys = [
        base,
        base._replace(seed=8),
        base._replace(seed=7 + (1 << 32)),
        base._replace(position=9),
        base._replace(choice=1),
        base._replace(domain=1),
    ]
    assert len({tuple(all_words(key, 64).tolist()) for key in keys}) == len(keys)


def test_uniform_never_reaches_its_ends_and_gumbel_is_bounded() -> None:
    ends = np.array([0, 2**32 - 1], dtype=np.uint32)
    low, high = uniform(ends)
    assert low == 2.0**-33
    assert high == 1.0 - 2.0**-33
    assert np.isfinite(gumbel(ends)).all()
    assert gumbel(ends).max() == pytest.approx(MAX_GUMBEL, abs=1e-5)
    assert gumbel(ends).max() <= MAX_GUMBEL + 1e-9
