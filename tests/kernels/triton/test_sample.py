"""Sampling against the CPU's sampler: the same tokens, from the same keys.

The device's noise is float32, the CPU's float64. Fixtures are checked to have their two best scores further apart than
1e-4, ten times the noise's error, so a token that differs is a bug.
"""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import philox as cpu
from engine.sampler import Sampler, SampleRow
from kernels.triton import sample
from pagewire.sampling import SamplingParams
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import random

MARGIN = 1e-4
TEMPERATURES = (0.0, 0.3, 1.0, 1.7, 0.0, 1.0)


def rows(num_rows: int = 6, seed: int = 2**63 + 12345) -> list[SampleRow]:
    return [
        SampleRow(
            logits_row=row % 3,
            params=SamplingParams(temperature=TEMPERATURES[row % 6]),
            seed=(seed + row) % 2**64,
            choice=row % 2,
            position=1000 * row,
        )
        for row in range(num_rows)
    ]


def draw(kernels: ModuleType, logits: Tensor, wanted: list[SampleRow], vocab_size: int) -> list[int]:
    def longs(values: list[int]) -> Tensor:
        return torch.tensor(np.array(values, dtype=np.uint64).view(np.int64))

    drawn = kernels.sample(
        logits,
        logits_rows=torch.tensor([row.logits_row for row in wanted], dtype=torch.int32),
        temperature=torch.tensor([row.params.temperature for row in wanted]),
        seeds=longs([row.seed for row in wanted]),
        positions=longs([row.position for row in wanted]),
        choices=longs([row.choice for row in wanted]),
        vocab_size=vocab_size,
    )
    return [int(token) for token in drawn]


def expected(logits: Tensor, wanted: list[SampleRow], vocab_size: int) -> list[int]:
    for row in wanted:
        scores = logits[row.logits_row, :vocab_size].double().numpy()
        if row.params.temperature > 0:
            key = cpu.NoiseKey(row.seed, row.position, row.choice)
            scores = scores / row.params.temperature + cpu.gumbel(cpu.all_words(key, vocab_size))
        best = np.sort(scores)[-2:]
        assert len(best) < 2 or best[1] - best[0] > MARGIN
    return [drawn.token_id for drawn in Sampler(vocab_size).sample(logits, wanted)]


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 4096, 9001])
def test_tokens_equal_the_cpus(vocab_size: int) -> None:
    logits = random(3, vocab_size + 5) * 3
    logits[:, vocab_size:] = 100.0  # padding of the output matrix is never drawn
    assert draw(sample, logits, rows(), vocab_size) == expected(logits, rows(), vocab_size)


def test_bfloat16_logits() -> None:
    logits = (random(3, 300) * 3).bfloat16()
    wanted = [row for row in rows() if row.params.temperature > 0]
    assert draw(sample, logits, wanted, 300) == expected(logits.float(), wanted, 300)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("raw / heat + gumbel", "raw + gumbel"),
        ("heat >= GREEDY_TEMPERATURE", "heat >= 1.5"),
        ("chunk * (CHUNK // 4), seed", "chunk * CHUNK, seed"),
        ("mask=inside, other", "mask=token < stride_logits, other"),
        ("seed, position, choice, DOMAIN, ", "seed, choice, position, DOMAIN, "),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    logits = random(3, 9001 + 5) * 3
    logits[:, 9001:] = 100.0
    assert draw(mutant(sample, old, new, tmp_path), logits, rows(), 9001) != expected(logits, rows(), 9001)


def test_the_lowest_of_equals_wins() -> None:
    logits = torch.zeros(1, 9001)
    logits[0, [4095, 4096, 5, 9000]] = 2.0
    assert draw(sample, logits, [rows()[0]], 9001) == [5]
    assert Sampler(9001).sample(logits, [rows()[0]])[0].token_id == 5


@pytest.mark.parametrize("broken", [[np.nan], [np.inf], [-np.inf], [1.0, np.nan], [np.inf, 1.0]])
def test_broken_logits_are_reported_for_that_row_alone(broken: list[float]) -> None:
    logits = torch.zeros(3, 5000)
    logits[1] = broken[0]
    logits[1, 4990:] = broken[-1]
    logits[[0, 2], 17] = 30.0
    drawn = draw(sample, logits, rows(3), 5000)
    assert drawn == [17, -1, 17]
    assert [row.token_id for row in Sampler(5000).sample(logits, rows(3))] == drawn


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((3, 9001), -torch.inf)
    logits[:, 8000] = -50.0
    assert draw(sample, logits, rows(), 9001) == [8000] * 6


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, wanted = random(3, 9001), rows()
    together = draw(sample, logits, wanted, 9001)
    assert [draw(sample, logits, [row], 9001)[0] for row in wanted] == together
    assert draw(sample, logits, [], 9001) == []
