"""The device's sampler against the engine's: same tokens, log-probabilities and errors for every kind of row.

Fixtures are such that the best two scores are further apart than the noise's error (see tests/kernels/triton), and a
top-p boundary further away than 1e-5.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.device_sampler import DeviceSampler
from engine.sample import SampledToken, SampleRow
from engine.sampler import Sampler
from kernels.triton import token_filter
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import expected as oracle
from tests.engine.sampler_oracle import make_row
from tests.kernels.triton.tensors import random

V = 90


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_filter, "_CHUNK", 128)


def rows() -> list[SampleRow]:
    history = {"prompt_token_ids": (1, 2, 2, 80), "output_token_ids": (5, 5, 80, 7, 5)}
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=3),
        SamplingParams(top_k=4, temperature=1.3, frequency_penalty=0.4),
        SamplingParams(top_p=0.8, logprobs=0),
        SamplingParams(min_p=0.1, presence_penalty=0.8, logit_bias={3: 2.0}, logprobs=1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, logprobs=4, drawable_logprobs=True),
        SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01),
    ]
    made = [
        make_row(each, logits_row=i % 3, seed=2**64 - 9 - i, position=50 + i, choice=i % 2, **history)
        for i, each in enumerate(params)
    ]
    made[5] = replace(made[5], allowed=np.arange(V) % 2 == 0, suppressed_token_ids=(4, V + 3))
    return made


def test_tokens_and_logprobs_are_the_engines() -> None:
    logits = random(3, V + 6) * 2
    logits[:, V:] = 40.0
    for row in rows():
        if row.allowed is None:
            assert oracle(logits[row.logits_row, :V].numpy(), row).slack > 1e-5
    drawn, wanted = DeviceSampler(V).sample(logits, rows()), Sampler(V).sample(logits, rows())
    for found, right in zip(drawn, wanted, strict=True):
        assert (found.token_id, found.error) == (right.token_id, right.error)
        assert (found.logprobs is None) == (right.logprobs is None)
        if found.logprobs is not None and right.logprobs is not None:
            assert found.logprobs.rank == right.logprobs.rank
            assert abs(found.logprobs.logprob - right.logprobs.logprob) < 4e-6
            assert [i for i, _ in found.logprobs.top] == [i for i, _ in right.logprobs.top]


def test_what_cannot_be_drawn_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random(3, V)
    logits[1, 3] = torch.nan
    wanted = [
        make_row(logits_row=1),
        make_row(allowed=np.zeros(V, dtype=np.bool_), params=SamplingParams(allowed_token_ids=(1,))),
        make_row(error="its grammar failed"),
        make_row(SamplingParams(temperature=0.0, logprobs=0), logits_row=2),
    ]
    right = Sampler(V).sample(logits, wanted)
    copied, on_host = [], Sampler.sample

    def sample(host: Sampler, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        copied.append(len(logits))
        return on_host(host, logits, rows)

    monkeypatch.setattr(Sampler, "sample", sample)
    drawn = DeviceSampler(V).sample(logits, wanted)
    assert copied == [1, 1, 1], "the failed rows alone"
    assert [(each.token_id, each.error, each.field) for each in drawn] == [
        (each.token_id, each.error, each.field) for each in right
    ]
    assert [each.error is None for each in drawn] == [False, False, False, True]


def test_logprobs_of_tokens_that_were_not_drawn() -> None:
    logits = random(3, V)
    found = DeviceSampler(V).logprobs_of(logits, [4, 0, 89], 2)
    for ours, right in zip(found, Sampler(V).logprobs_of(logits, [4, 0, 89], 2), strict=True):
        assert (ours.rank, [i for i, _ in ours.top]) == (right.rank, [i for i, _ in right.top])
        assert abs(ours.logprob - right.logprob) < 4e-6
    more = DeviceSampler(V).logprobs_of(logits, [4, 0, 89], 70)  # more than the kernel takes
    assert [len(each.top) for each in more] == [70] * 3
