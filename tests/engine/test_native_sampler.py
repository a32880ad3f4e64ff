"""The native sampler against the plain one: the same tokens, in passing and of whole rows, in any company."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.head_rows import HeadRows
from engine.lora.step import LoraStep
from engine.native_sampler import NativeSampler
from engine.sample import SampledToken, SampleRow
from engine.sampler import Sampler
from kernels import cpu
from kernels.cpu.packed import PackedWeight
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import make_row

if cpu.why_unavailable():
    pytest.skip(cpu.why_unavailable(), allow_module_level=True)

from kernels.cpu.native import NativeKernels

V, PADDED, H = 1003, 1010, 64
PARAMS = [
    SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=5), SamplingParams(temperature=0.0, logprobs=200),
    SamplingParams(temperature=0.8), SamplingParams(temperature=2.5, logprobs=3), SamplingParams(top_k=7),
    SamplingParams(top_k=20, top_p=0.7, min_p=0.02), SamplingParams(top_k=300), SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.5, min_p=0.05, temperature=0.6), SamplingParams(min_p=0.1), SamplingParams(top_k=1),
    SamplingParams(repetition_penalty=1.3), SamplingParams(logit_bias={5: 4.0}, temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.0, logprobs=4, drawable_logprobs=True), SamplingParams(top_p=0.9999999),
]  # fmt: skip


class Head:
    """A model that is nothing but an output matrix [PADDED, H]."""

    def __init__(self, weight: Tensor) -> None:
        self.kernels = NativeKernels(cpu.load())
        self.head: PackedWeight = self.kernels.pack(weight)
        self.num_whole = 0

    def logits(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor:
        self.num_whole += len(hidden)
        return self.kernels.logits(hidden, self.head)

    def head_input(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor | None:
        return hidden


def head(seed: int = 0, *, ties: bool = False) -> Head:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(PADDED, H, generator=random)
    if ties:
        weight = weight[:37].repeat(28, 1)[:PADDED]
    return Head((weight * 0.5).to(torch.bfloat16))


def rows_of(params: list[SamplingParams], num_rows: int) -> list[SampleRow]:
    return [
        make_row(
            own, logits_row=i % num_rows, seed=i * 977, choice=i % 3, position=40 + i, prompt_token_ids=[3, 4],
            output_token_ids=[8, 8, 9],
        ) for i, own in enumerate(params)
    ]  # fmt: skip


def assert_like(found: SampledToken, right: SampledToken) -> None:
    assert (found.token_id, found.error, found.field) == (right.token_id, right.error, right.field)
    assert (found.logprobs is None) == (right.logprobs is None)
    if found.logprobs is not None and right.logprobs is not None:
        assert found.logprobs.rank == right.logprobs.rank
        assert found.logprobs.logprob == pytest.approx(right.logprobs.logprob, abs=2e-6)
        assert [i for i, _ in found.logprobs.top] == [i for i, _ in right.logprobs.top]
        assert [p for _, p in found.logprobs.top] == pytest.approx([p for _, p in right.logprobs.top], abs=2e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_the_plain_samplers(ties: bool) -> None:
    for seed, num_rows in itertools.product(range(4), (1, 5, 17)):
        model = head(seed, ties=ties)
        hidden = torch.randn(num_rows, H, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        rows = rows_of(PARAMS * 3, num_rows)
        sampler, logits = NativeSampler(V, model.kernels), model.logits(hidden)
        _, found = sampler.sample_from(HeadRows(model, hidden), rows, [])
        for own, whole, right in zip(found, sampler.sample(logits, rows), Sampler(V).sample(logits, rows), strict=True):
            assert own == whole
            assert_like(own, right)


def test_a_rows_token_and_logprobs_do_not_depend_on_others() -> None:
    model = head(3)
    hidden = torch.randn(23, H, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    rows = [replace(row, logits_row=i) for i, row in enumerate(rows_of((PARAMS * 2)[:23], 23))]
    sampler = NativeSampler(V, model.kernels)
    _, together = sampler.sample_from(HeadRows(model, hidden), rows, [])
    for i, row in enumerate(rows):
        _, alone = sampler.sample_from(HeadRows(model, hidden[i : i + 1]), [replace(row, logits_row=0)], [])
        assert alone == [together[i]]


def test_logits_nobody_asks_for_are_not_made() -> None:
    model = head()
    hidden = torch.randn(4, H, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    rows = [make_row(PARAMS[i], logits_row=row) for row, i in enumerate((0, 2, 4, 7))]
    logits, _ = NativeSampler(V, model.kernels).sample_from(HeadRows(model, hidden), rows, [2])
    assert model.num_whole == 0
    assert torch.equal(logits[2], model.logits(hidden)[2])


def test_broken_rows_fail_alone() -> None:
    model = head()
    hidden = torch.randn(6, H, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    hidden[1], hidden[2] = torch.nan, torch.inf
    for params in PARAMS:
        rows = [make_row(params, logits_row=i, output_token_ids=[1]) for i in range(6)]
        rows[4] = replace(rows[4], allowed=np.zeros(V, dtype=np.bool_))
        rows[5] = replace(rows[5], error="its grammar failed")
        sampler = NativeSampler(V, model.kernels)
        _, found = sampler.sample_from(HeadRows(model, hidden), rows, [])
        with np.errstate(invalid="ignore"):
            for own, right in zip(found, Sampler(V).sample(model.logits(hidden), rows), strict=True):
                assert_like(own, right)


def test_prompt_logprobs() -> None:
    logits = torch.randn(7, PADDED, generator=torch.Generator().manual_seed(1)) * 5
    token_ids = [0, 1, 1002, 500, 7, 7, 9]
    sampler = NativeSampler(V, NativeKernels(cpu.load()))
    for num_top in (0, 3, 150):
        right = Sampler(V).logprobs_of(logits, token_ids, num_top)
        for own, expected in zip(sampler.logprobs_of(logits, token_ids, num_top), right, strict=True):
            assert_like(SampledToken(1, own), SampledToken(1, expected))
