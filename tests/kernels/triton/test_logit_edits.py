"""Bias, suppression, penalties and masks against `engine.logit_adjustment`: float32 in the same order, so bitwise."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device_sample_rows import pack_edits
from engine.logit_adjustment import adjust
from engine.sample import SampleRow
from kernels.triton import logit_edits
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import make_row
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import random

V = 99


def rows() -> list[SampleRow]:
    allowed = np.arange(V) % 3 != 1
    history = {"prompt_token_ids": (1, 2, 2, 98), "output_token_ids": (5, 5, 98, 7, 5)}
    return [
        make_row(SamplingParams(repetition_penalty=1.3), logits_row=1, **history),
        make_row(SamplingParams(frequency_penalty=0.37, presence_penalty=-0.21, logit_bias={3: 0.5}), **history),
        make_row(SamplingParams(logit_bias={0: 3.3, 5: -100.0, 98: 0.1}), suppressed_token_ids=(4, 98, V + 7)),
        make_row(SamplingParams(), logits_row=1),
        make_row(SamplingParams(logit_bias={7: 1.5}, repetition_penalty=0.8), allowed=allowed, **history),
        make_row(SamplingParams(), allowed=~allowed),
    ]


def edited(kernels: ModuleType, logits: Tensor, wanted: list[SampleRow]) -> Tensor:
    edits = pack_edits(wanted, V, torch.device("cpu"))
    assert edits is not None
    logits_rows = torch.tensor([row.logits_row for row in wanted], dtype=torch.int32)
    out: Tensor = kernels.edit_logits(logits, logits_rows, edits, V)
    return out


def expected(logits: Tensor, wanted: list[SampleRow]) -> Tensor:
    return torch.stack([torch.from_numpy(adjust(logits[row.logits_row, :V].numpy(), row).copy()) for row in wanted])


def test_the_cpus_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random(2, V + 3)
    assert torch.equal(edited(logit_edits, logits, rows()), expected(logits, rows()))
    monkeypatch.setattr(logit_edits, "_CHUNK", 64)
    monkeypatch.setattr(logit_edits, "_EDITS", 2)
    assert torch.equal(edited(logit_edits, logits, rows()), expected(logits, rows()))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.where(x > 0, tl", "tl.where(x < 0, tl"),
        ("* count.to(tl.float32)", ""),
        ("tl.where(count > 0, less, x)", "less"),
        ("token % 32", "token % 31"),
        ("sample * stride_allowed", "0 * stride_allowed"),
        ("tl.load(starts + sample) + ", "tl.load(starts) + "),
        ("tl.load(bias + edit, mask=inside", "tl.load(bias + edit, mask=edit < 0"),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    logits = random(2, V)
    assert not torch.equal(edited(mutant(logit_edits, old, new, tmp_path), logits, rows()), expected(logits, rows()))


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random(2, V)
    together = edited(logit_edits, logits, rows())
    for sample, row in enumerate(rows()):
        if pack_edits([row], V, torch.device("cpu")) is not None:
            assert torch.equal(edited(logit_edits, logits, [row])[0], together[sample])


def test_broken_logits_are_not_hidden() -> None:
    logits = torch.zeros(1, V)
    logits[0, [1, 4]] = torch.tensor([torch.nan, torch.inf])
    out = edited(logit_edits, logits, rows()[4:5])
    assert out[0, 1].isnan()
    assert out[0, 4] == torch.inf


def test_what_does_not_fit_is_refused() -> None:
    edits = pack_edits(rows(), V, torch.device("cpu"))
    assert edits is not None
    with pytest.raises(ValueError, match="starts \\(7,\\) must have 2 entries"):
        logit_edits.edit_logits(random(2, V), torch.zeros(1, dtype=torch.int32), edits, V)
