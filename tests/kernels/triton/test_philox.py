"""The device's noise: the very integers of `engine/philox.py` and of the golden vectors, Gumbel values within 1e-5."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import philox as cpu
from kernels.triton import philox
from tests.kernels.triton.mutants import mutant

KEYS = [
    cpu.NoiseKey(0, 0, 0),
    cpu.NoiseKey(2**64 - 1, 2**31 - 1, 5),
    cpu.NoiseKey(0x9E3779B97F4A7C15, 131071, 63),
    cpu.NoiseKey(2**63, 1, 1),
]


def noise(module: object, key: cpu.NoiseKey, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    seed = key.seed - 2**64 if key.seed >= 2**63 else key.seed
    named = {"seed": seed, "position": key.position, "choice": key.choice}
    words, values = module.token_noise(vocab_size, **{name: torch.tensor([value]) for name, value in named.items()})  # type: ignore[attr-defined]
    return words.numpy().view(np.uint32), values.numpy()


@pytest.mark.parametrize("vocab_size", [1, 5, 4099])
def test_integers_equal_the_engines(vocab_size: int) -> None:
    for key in KEYS:
        words, values = noise(philox, key, vocab_size)
        expected = cpu.all_words(key, vocab_size)
        assert np.array_equal(words, expected)
        assert np.abs(values - cpu.gumbel(expected)).max() < 1e-5


def test_domain_is_the_engines() -> None:
    assert philox.DOMAIN_TOKEN == cpu.DOMAIN_TOKEN


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(10)", "range(9)"),
        ("high0 ^ c3 ^ k1", "high0 ^ c3 ^ k0"),
        ("tl.interleave(tl.interleave(w0, w2)", "tl.interleave(tl.interleave(w2, w0)"),
        ("(key >> 32)", "(key >> 31)"),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    words, _ = noise(mutant(philox, old, new, tmp_path), KEYS[2], 5)
    assert not np.array_equal(words, cpu.all_words(KEYS[2], 5))


def test_the_rarest_words() -> None:
    """u nearest to 0, to 1/2 and to 1, where a float32 u would be 1 and the noise infinite."""
    import triton
    import triton.language as tl

    @triton.jit
    def draw(words, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        lane = tl.arange(0, COUNT)
        tl.store(out + lane, philox.gumbel(tl.load(words + lane).to(tl.uint32, bitcast=True)))

    raw = np.array([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 200, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    out = torch.empty(8)
    draw[(1,)](torch.from_numpy(raw.view(np.int32)), out, COUNT=8)
    assert np.abs(out.numpy() - cpu.gumbel(raw)).max() < 1e-5
    assert float(out.max()) <= cpu.MAX_GUMBEL + 1e-5


def test_golden_vectors() -> None:
    path = Path(__file__).parents[3] / "protos/pagewire/v1/philox.json"
    entries = json.loads(path.read_text())["noise"]
    assert entries
    for entry in entries:
        key = cpu.NoiseKey(int(entry["seed"]), entry["position"], entry["choice"], entry["domain"])
        if key.domain == philox.DOMAIN_TOKEN and max(entry["token_ids"]) < 20_000:
            words, values = noise(philox, key, max(entry["token_ids"]) + 1)
            assert words[entry["token_ids"]].tolist() == entry["words"]
            assert np.abs(values[entry["token_ids"]] - np.array(entry["gumbel"])).max() < 1e-5
