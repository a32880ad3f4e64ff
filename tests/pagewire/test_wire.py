"""Sampling parameters: the way over protobuf and back, and each bad value with its exact field and message."""

import dataclasses
import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams
from pagewire.v1 import types_pb2
from pagewire.wire import sampling_from_proto, sampling_to_proto, validate_sampling

VOCAB_SIZE = 300
MAX_MODEL_LEN = 512


def check(**values: Any) -> None:
    validate_sampling(SamplingParams(**values), vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


def test_unset_fields_get_the_defaults() -> None:
    assert sampling_from_proto(types_pb2.SamplingParams()) == SamplingParams()


def test_explicit_zero_is_not_unset() -> None:
    message = types_pb2.SamplingParams(temperature=0, max_tokens=0, n=0, logprobs=0, seed=0, top_p=0)
    params = sampling_from_proto(message)
    assert (params.temperature, params.max_tokens, params.n, params.logprobs, params.seed) == (0, 0, 0, 0, 0)
    assert params.top_p == 0


FLOATS = st.floats(width=32, allow_nan=False)
UINT32 = st.integers(0, 2**32 - 1)


@given(
    st.builds(
        SamplingParams,
        n=UINT32,
        max_tokens=st.none() | UINT32,
        min_tokens=UINT32,
        temperature=FLOATS,
        top_p=FLOATS,
        top_k=UINT32,
        min_p=FLOATS,
        repetition_penalty=FLOATS,
        presence_penalty=FLOATS,
        frequency_penalty=FLOATS,
        seed=st.none() | st.integers(0, 2**64 - 1),
        logit_bias=st.dictionaries(UINT32, FLOATS, max_size=3),
        stop_token_ids=st.lists(UINT32, max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | UINT32,
    )
)
def test_round_trip(params: SamplingParams) -> None:
    wire = sampling_to_proto(params).SerializeToString()
    assert sampling_from_proto(types_pb2.SamplingParams.FromString(wire)) == params


def test_every_field_is_carried() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


GOOD: list[dict[str, Any]] = [
    {},
    {"n": 1},
    {"n": 64},
    {"max_tokens": 1},
    {"max_tokens": 10**6},
    {"min_tokens": 3, "max_tokens": 3},
    {"min_tokens": MAX_MODEL_LEN - 1},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"top_p": 1e-6},
    {"top_p": 1.0},
    {"top_k": 0},
    {"top_k": 10**9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 0.01},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"logprobs": 0},
    {"logprobs": 20},
    {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}},
    {"stop_token_ids": (0, VOCAB_SIZE - 1)},
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_limits_are_inside(values: dict[str, Any]) -> None:
    check(**values)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "must be in 1 … 64; got 0"),
    ({"n": 65}, "n", "must be in 1 … 64; got 65"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1; got 0"),
    ({"max_tokens": -1}, "max_tokens", "must be at least 1; got -1"),
    ({"min_tokens": -1}, "min_tokens", "must be at least 0; got -1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "must be at most sampling.max_tokens = 4; got 5"),
    ({"min_tokens": 512}, "min_tokens", "must be below the model's context length of 512 tokens; got 512"),
    ({"temperature": -0.1}, "temperature", "must be finite and at least 0; got -0.1"),
    ({"temperature": math.nan}, "temperature", "must be finite and at least 0; got nan"),
    ({"temperature": math.inf}, "temperature", "must be finite and at least 0; got inf"),
    ({"top_p": 0.0}, "top_p", "must be in (0, 1]; got 0.0"),
    ({"top_p": 1.5}, "top_p", "must be in (0, 1]; got 1.5"),
    ({"top_p": math.nan}, "top_p", "must be in (0, 1]; got nan"),
    ({"top_k": -1}, "top_k", "must be in 0 … 2**32-1 (0 keeps all tokens); got -1"),
    ({"min_p": -0.5}, "min_p", "must be in [0, 1]; got -0.5"),
    ({"min_p": 1.5}, "min_p", "must be in [0, 1]; got 1.5"),
    ({"min_p": math.nan}, "min_p", "must be in [0, 1]; got nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "must be finite and above 0; got 0.0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "must be finite and above 0; got -1.0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty", "must be finite and above 0; got inf"),
    ({"repetition_penalty": math.nan}, "repetition_penalty", "must be finite and above 0; got nan"),
    ({"presence_penalty": 2.5}, "presence_penalty", "must be in [-2, 2]; got 2.5"),
    ({"presence_penalty": math.nan}, "presence_penalty", "must be in [-2, 2]; got nan"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "must be in [-2, 2]; got -2.5"),
    ({"seed": -1}, "seed", "must be in 0 … 2**64-1; got -1"),
    ({"seed": 2**64}, "seed", f"must be in 0 … 2**64-1; got {2**64}"),
    ({"logprobs": 21}, "logprobs", "must be in 0 … 20; got 21"),
    ({"logprobs": -1}, "logprobs", "must be in 0 … 20; got -1"),
    ({"logit_bias": {300: 1.0}}, "logit_bias", "must be a token id below the vocabulary size of 300; got 300"),
    ({"logit_bias": {7: 101.0}}, "logit_bias[7]", "must be in [-100, 100]; got 101.0"),
    ({"logit_bias": {7: math.nan}}, "logit_bias[7]", "must be in [-100, 100]; got nan"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "has 1025 entries, must have at most 1024"),
    ({"stop_token_ids": (300,)}, "stop_token_ids", "must be a token id below the vocabulary size of 300; got 300"),
    ({"stop_token_ids": (1,) * 129}, "stop_token_ids", "has 129 entries, must have at most 128"),
]


@pytest.mark.parametrize(("values", "field", "description"), BAD, ids=lambda value: str(value)[:40])
def test_bad_values(values: dict[str, Any], field: str, description: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(**values)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    (detail,) = caught.value.details
    assert isinstance(detail, error_details_pb2.BadRequest)
    (violation,) = detail.field_violations
    assert (violation.field, violation.description) == (f"sampling.{field}", description)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"n": -1}, "n"),
        ({"top_k": -5}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 2**32}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
    ids=str,
)
def test_what_protobuf_cannot_carry_is_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sampling_to_proto(SamplingParams(**values))
    assert caught.value.field == f"sampling.{field}"
