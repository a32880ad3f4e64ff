"""Bias, suppression and penalties: exact against a token-by-token oracle, and what they do to greedy text."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from engine.logit_adjustment import adjust
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import adjusted, make_row, sample_one

RAW = (np.random.default_rng(0).standard_normal(30) * 4).astype(np.float32)
PROMPT, OUTPUT = (1, 2, 2, 3), (3, 4, 4, 4, 29)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 1.5},
        {"logit_bias": MappingProxyType({0: 5.0, 3: -100.0})},
        {
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.3,
            "presence_penalty": -0.2,
            "logit_bias": MappingProxyType({4: 2.5, 7: 1.0}),
        },
    ],
)
@pytest.mark.parametrize("suppressed", [(), (3, 11), (3, 30, 999)])
def test_adjusted_logits_equal_the_oracles(fields: dict[str, Any], suppressed: tuple[int, ...]) -> None:
    row = make_row(
        SamplingParams(**fields),
        prompt_token_ids=PROMPT,
        output_token_ids=OUTPUT,
        suppressed_token_ids=suppressed,
    )
    before = RAW.copy()
    found = adjust(RAW, row)
    assert np.array_equal(found, adjusted(RAW, row))
    assert not np.array_equal(found, RAW)
    assert np.array_equal(before, RAW)  # the model's logits are shared and stay as they are


def test_without_changes_the_row_is_not_copied() -> None:
    assert adjust(RAW, make_row(SamplingParams(), prompt_token_ids=PROMPT, output_token_ids=OUTPUT)) is RAW
    assert adjust(RAW, make_row(SamplingParams(presence_penalty=1.0), prompt_token_ids=PROMPT)) is RAW


@pytest.mark.parametrize(
    ("params", "token_id"),
    [
        (SamplingParams(temperature=0.0), 0),
        (SamplingParams(temperature=0.0, repetition_penalty=2.0), 2),  # of prompt and output
        (SamplingParams(temperature=0.0, presence_penalty=1.5), 1),  # of the output alone
        (SamplingParams(temperature=0.0, frequency_penalty=1.0), 1),
        (SamplingParams(temperature=0.0, logit_bias=MappingProxyType({3: 10.0})), 3),
    ],
)
def test_penalties_change_greedy_text(params: SamplingParams, token_id: int) -> None:
    logits = [5.0, 4.5, 4.0, 3.0]
    assert sample_one(logits, params, prompt_token_ids=(1,), output_token_ids=(0, 0)).token_id == token_id


def test_repetition_penalty_makes_negative_logits_less_likely_too() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    assert sample_one([-2.0, -2.5], params, output_token_ids=(0,)).token_id == 1


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=2)])
@pytest.mark.parametrize("bias", [MappingProxyType({}), MappingProxyType({0: 100.0, 1: 100.0})])
def test_suppressed_tokens_are_never_drawn_whatever_their_bias(
    params: SamplingParams, bias: Mapping[int, float]
) -> None:
    biased = SamplingParams(temperature=params.temperature, top_k=params.top_k, logit_bias=bias)
    for position in range(40):
        token = sample_one([50.0, 40.0, 1.0, 0.5], biased, suppressed_token_ids=(0, 1), position=position)
        assert token.token_id in (2, 3)
    # Once min_tokens is reached nothing is suppressed and the end-of-sequence token wins.
    assert sample_one([50.0, 4.0, 1.0, 0.5], biased).token_id in (0, 1)
