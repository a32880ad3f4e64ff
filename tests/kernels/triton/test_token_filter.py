"""Which tokens the filters leave, against the CPU's `filter_candidates`, ties included.

The CPU's top-p sums exp in float64, the device's are float32 of 2^-22: the fixtures are checked to reach the wanted
probability by more than 1e-5 of it, so that a token more or less is a bug.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.candidates import filter_candidates
from kernels.triton import token_filter
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import expected as oracle
from tests.engine.sampler_oracle import make_row
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import random

MARGIN = 1e-5
PARAMS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=7, temperature=0.7),
    SamplingParams(top_k=50),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.5, temperature=1.6),
    SamplingParams(top_p=0.93),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=0.04, temperature=0.8),
    SamplingParams(min_p=0.02, top_k=60, top_p=0.8, temperature=1.3),
    SamplingParams(top_k=40, top_p=0.9),
    SamplingParams(temperature=0.0, top_k=2),
    SamplingParams(),
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a row without a large vocabulary: the interpreter is slow."""
    monkeypatch.setattr(token_filter, "_CHUNK", 64)


def filters(params: list[SamplingParams]) -> token_filter.Filters:
    depths = [each.temperature * math.log(each.min_p) if each.min_p else -math.inf for each in params]
    return token_filter.Filters(
        torch.tensor([each.top_k for each in params], dtype=torch.int32),
        torch.tensor([each.top_p for each in params], dtype=torch.float64),
        torch.tensor(depths, dtype=torch.float64),
    )


def kept_tokens(kernels: ModuleType, logits: Tensor, params: list[SamplingParams], size: int) -> list[list[int]]:
    """Token ids of each sample; sample s has row s % R."""
    rows = torch.arange(len(params), dtype=torch.int32) % logits.shape[0]
    cutoffs = kernels.filter_tokens(
        logits,
        logits_rows=rows,
        temperature=torch.tensor([each.temperature for each in params]),
        filters=filters(params),
        vocab_size=size,
        greedy_temperature=1e-5,
    )
    found = []
    for row, cutoff in zip(rows.tolist(), cutoffs.tolist(), strict=True):
        bits = (logits[row, :size].float() + 0.0).numpy().view(np.int32)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
        keys = (ordered << 20) + (2**20 - 1 - np.arange(size))
        found.append(np.flatnonzero(keys >= cutoff).tolist())
    return found


def wanted_tokens(logits: Tensor, params: list[SamplingParams], size: int) -> list[list[int]]:
    wanted = []
    for sample, each in enumerate(params):
        row = logits[sample % logits.shape[0], :size].float().numpy()
        if each.temperature == 0.0:
            wanted.append(list(range(size)))
            continue
        if each.top_p < 1.0:
            assert (
                oracle(row, make_row(replace(each, min_p=0.0))).slack > MARGIN
            )  # of min-p, ties are meant to be there
        candidates = filter_candidates(row, each)
        wanted.append(list(range(size)) if candidates.ids is None else candidates.ids.tolist())
    return wanted


def tied(size: int) -> Tensor:
    """Logits in steps of 1/4, so that many are equal, both zeros among them; padding that would win."""
    logits = (random(3, size + 9) * 12).round() / 4
    logits[:, size:] = 50.0
    return logits


@pytest.mark.parametrize("size", [1, 64, 70])
def test_the_cpus_tokens_stay(size: int, small_chunks: None) -> None:
    logits = torch.cat((tied(size)[:1, :size], random(1, size) * 3))
    assert kept_tokens(token_filter, logits, PARAMS, size) == wanted_tokens(logits, PARAMS, size)


@pytest.mark.nightly
def test_a_large_vocabulary() -> None:
    logits = random(1, 3001) * 3
    assert kept_tokens(token_filter, logits, PARAMS[9:10], 3001) == wanted_tokens(logits, PARAMS[9:10], 3001)


@pytest.mark.nightly
def test_bfloat16_and_infinities(small_chunks: None) -> None:
    logits = (random(2, 60) * 2).bfloat16()
    logits[0, 40:] = -torch.inf
    logits[1, :10] = -torch.inf
    assert kept_tokens(token_filter, logits, PARAMS[2:7], 60) == wanted_tokens(logits, PARAMS[2:7], 60)


FEW = [
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.505, temperature=2.0),
    SamplingParams(min_p=0.05, top_k=40, top_p=0.69, temperature=1.7),
    SamplingParams(min_p=0.3, temperature=0.9),
]


def zeros() -> Tensor:
    logits = torch.zeros(1, 100)
    logits[0, ::3] = -0.0
    return logits


def test_all_logits_equal(small_chunks: None) -> None:
    assert kept_tokens(token_filter, zeros(), FEW, 100) == [
        list(range(5)),
        list(range(51)),
        list(range(28)),
        list(range(100)),
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(_LAST_ID - token)", "token"),
        ("tl.where(logit == 0.0, 0.0, logit)", "logit"),
        ("& 0x7FFFFFFF", "& 0x00000000"),
        ("& (num_inside > 1)", "& (num_inside > 2)"),
        ("down_to >= wanted", "down_to > wanted"),
        ("tl.where(part > found, measure, 0)", "tl.where(part >= found, measure, 0)"),
        ("tl.maximum(cutoff, _narrow", "tl.maximum(NO_CUTOFF, _narrow"),
        ("(token < vocab_size) & (order_keys(logit, token) >= cutoff)", "token < vocab_size"),
        ("(logit - top) / heat", "(logit - top)"),
        ("(top.to(tl.float64) + depth)", "(top.to(tl.float64) + depth * 2.0)"),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant(token_filter, old, new, tmp_path)
    broken._CHUNK = 128  # type: ignore[attr-defined]
    logits = torch.cat((zeros(), tied(100)[:1, :100] - 20))
    params = [each for each in FEW for _ in logits]
    assert kept_tokens(broken, logits, params, 100) != wanted_tokens(logits, params, 100)


def test_a_row_does_not_depend_on_the_others(small_chunks: None) -> None:
    logits = random(2, 70)
    together = kept_tokens(token_filter, logits, PARAMS[5:11], 70)
    for sample, params in enumerate(PARAMS[5:11]):
        alone = logits[sample % 2][None]
        assert kept_tokens(token_filter, alone, [params], 70) == [together[sample]]


def test_no_rows_and_what_does_not_fit() -> None:
    assert kept_tokens(token_filter, torch.zeros(1, 8), [], 8) == []
    with pytest.raises(ValueError, match="a vocabulary of 1048577 tokens; filters take at most 1048576"):
        kept_tokens(token_filter, torch.zeros(1, 2**20 + 1), PARAMS[:1], 2**20 + 1)
