"""Sampling parameters of a request: its `parameters`, or the JSON object that Triton's vLLM backend takes as an input.

That backend's own examples write numbers as text, so text that is a number is one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Any

from pagewire.errors import InvalidArgument
from pagewire.foreign.triton import grpc_service_pb2 as pb
from pagewire.sampling import SamplingParams, StructuredOutput
from router.http.structures import structure_of
from router.request import TextOptions

MAX_JSON_BYTES = 64 << 10
# What clients of the protocol say to the server itself.
FINAL_RESPONSE = "triton_enable_empty_final_response"
_CONTROL = frozenset({FINAL_RESPONSE, "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"})
_COUNTS = frozenset({"n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "truncate_prompt_tokens"})
_NUMBERS = frozenset({"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"})
_FLAGS = frozenset({"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"})
_TEXTS = frozenset({"stop", "bad_words"})
_TOKEN_IDS = frozenset({"stop_token_ids", "allowed_token_ids"})
# vLLM's present name and its former one.
_STRUCTURES = frozenset({"structured_outputs", "guided_decoding"})
_KNOWN = _COUNTS | _NUMBERS | _FLAGS | _TEXTS | _TOKEN_IDS | _STRUCTURES | {"logit_bias", "cache_salt"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """As the pipeline takes them; ranges are checked there. `seconds` is the client's own limit."""

    sampling: SamplingParams
    text_options: TextOptions
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    seconds: float | None = None
    control: Mapping[str, Any] = field(default_factory=dict)


def read_parameters(given: Mapping[str, pb.InferParameter], sampling_json: str) -> Parameters:
    """Raises InvalidArgument for what is unknown, said twice, or of the wrong kind."""
    plain: dict[str, Any] = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            plain[name] = getattr(parameter, kind)
    control = {name: plain.pop(name) for name in _CONTROL & plain.keys()}
    of_json = _read_json(sampling_json)
    if both := sorted(plain.keys() & of_json.keys()):
        raise InvalidArgument(f"parameters.{both[0]}", plain[both[0]], "is in sampling_parameters too")
    values = {name: _value(name, value) for name, value in (plain | of_json).items()}
    text_options = TextOptions(
        values.pop("stop", ()),
        values.pop("include_stop_str_in_output", False),
        values.pop("skip_special_tokens", True),
        values.pop("bad_words", ()),
    )
    cache_salt, truncate = values.pop("cache_salt", ""), values.pop("truncate_prompt_tokens", None)
    structures = [found for name in sorted(_STRUCTURES) if (found := values.pop(name, None)) is not None]
    if len(structures) > 1:
        raise InvalidArgument("parameters.guided_decoding", None, "is structured_outputs' older name: use one of them")
    timeout = _count("timeout", control.get("timeout", 0))
    return Parameters(
        SamplingParams(**values, structured_output=structures[0] if structures else None),
        text_options,
        cache_salt,
        truncate,
        _count("priority", control.get("priority", 0)),
        timeout / 1e6 if timeout else None,  # microseconds
        control,
    )


def _read_json(text: str) -> dict[str, Any]:
    name = "sampling_parameters"
    if not text:
        return {}
    if len(text) > MAX_JSON_BYTES:
        raise InvalidArgument(name, None, f"has {len(text)} characters, must have at most {MAX_JSON_BYTES}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(name, text, "must be a JSON object") from None
    if not isinstance(values, dict):
        raise InvalidArgument(name, text, "must be a JSON object")
    return values


def _value(name: str, value: Any) -> Any:
    if name not in _KNOWN:
        raise InvalidArgument("parameters", name, f"is none of {', '.join(sorted(_KNOWN))}")
    if name in _COUNTS:
        return _count(name, value)
    if name in _NUMBERS:
        return _number(name, value)
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise InvalidArgument(f"parameters.{name}", value, "must be true or false")
        return value
    if name == "cache_salt":
        return _text(name, value)
    if name in _TEXTS:
        return _texts(name, value)
    if name in _TOKEN_IDS:
        return _token_ids(name, value)
    return _structure(name, value) if name in _STRUCTURES else _logit_bias(value)


def _count(name: str, value: Any) -> int:
    number = _number(name, value)
    if number != int(number):
        raise InvalidArgument(f"parameters.{name}", value, "must be a whole number")
    # A float is not exact above 2**53.
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else int(number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidArgument(f"parameters.{name}", value, "must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"parameters.{name}", value, "must be a number") from None
    if not isfinite(number):
        raise InvalidArgument(f"parameters.{name}", value, "must be a finite number")
    return number


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One string, or several as JSON has them."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise InvalidArgument(f"parameters.{name}", None, "must be a string or a list of strings")
    return tuple(_text(name, each) for each in strings)


def _text(name: str, value: Any) -> str:
    """JSON can escape half a character, which no UTF-8 can carry."""
    if not isinstance(value, str):
        raise InvalidArgument(f"parameters.{name}", None, "must be text")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidArgument(f"parameters.{name}", None, "must be Unicode text; it has a lone surrogate")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidArgument(f"parameters.{name}", value, "must be a list of token ids")
    return tuple(_count(name, each) for each in value)


def _structure(name: str, value: Any) -> StructuredOutput | None:
    if not isinstance(value, dict):
        raise InvalidArgument(f"parameters.{name}", None, "must be an object with one constraint")
    return structure_of(None, value, {})


def _logit_bias(value: Any) -> Mapping[int, float]:
    if not isinstance(value, dict):
        raise InvalidArgument("parameters.logit_bias", value, "must map token ids to numbers")
    return MappingProxyType({_count("logit_bias", key): _number("logit_bias", bias) for key, bias in value.items()})
