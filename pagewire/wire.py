"""Sampling parameters between protobuf and plain data, and the check of every value a client can send."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.v1 import types_pb2

MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_WORKER_LOGPROBS = 128  # what routers may ask of workers: beam search looks at more
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 256
MAX_STRUCTURE_BYTES = 1 << 16
MAX_STRUCTURE_CHOICES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
_MAX_SEED = 2**64 - 1
_MAX_UINT32 = 2**32 - 1

_OPTIONAL_FIELDS = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
)


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Plain parameters; unset fields get SamplingParams' defaults. Values are not checked here.

    Raises InvalidArgument for a structured output that says nothing.
    """
    given: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        convert = _FROM_PROTO.get(descriptor.name)
        given[descriptor.name] = value if convert is None else convert(value)
    return SamplingParams(**given)


def _structure_from_proto(message: types_pb2.StructuredOutput) -> StructuredOutput:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidArgument("sampling.structured_output", None, "must have a constraint")
    if kind == "choice":
        return StructuredOutput(kind, choices=tuple(message.choice.texts))
    return StructuredOutput(kind, "" if kind == "json_object" else getattr(message, kind))


_FROM_PROTO: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": lambda biases: MappingProxyType(dict(biases)),
    "stop_token_ids": tuple,
    "allowed_token_ids": tuple,
    "bad_words_token_ids": lambda words: tuple(tuple(word.token_ids) for word in words),
    "structured_output": _structure_from_proto,
}
"""What is no plain number."""


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """The message a worker gets; every field with a value is set explicitly.

    Raises InvalidArgument for what protobuf cannot carry (a negative count, text for a number).
    """
    message = types_pb2.SamplingParams(ignore_eos=params.ignore_eos, drawable_logprobs=params.drawable_logprobs)
    for name in _OPTIONAL_FIELDS:
        value = getattr(params, name)
        if value is not None:
            try:
                setattr(message, name, value)
            except (TypeError, ValueError):
                raise InvalidArgument(f"sampling.{name}", value, _WIRE_LIMITS.get(name, "must be a number")) from None
    try:
        message.logit_bias.update(params.logit_bias)
    except (TypeError, ValueError):
        limit = "must map token ids (whole numbers >= 0) to numbers"
        raise InvalidArgument("sampling.logit_bias", dict(params.logit_bias), limit) from None
    try:
        message.stop_token_ids.extend(params.stop_token_ids)
    except (TypeError, ValueError):
        limit = "must be token ids, whole numbers in 0 … 2**32-1"
        raise InvalidArgument("sampling.stop_token_ids", params.stop_token_ids, limit) from None
    if params.is_constrained:
        _constraints_to_proto(params, message)
    return message


def _constraints_to_proto(params: SamplingParams, message: types_pb2.SamplingParams) -> None:
    name = "allowed_token_ids"
    try:
        message.allowed_token_ids.extend(params.allowed_token_ids)
        name = "bad_words_token_ids"
        for word in params.bad_words_token_ids:
            message.bad_words_token_ids.add(token_ids=word)
    except (TypeError, ValueError):
        limit = "must be token ids, whole numbers in 0 … 2**32-1"
        raise InvalidArgument(f"sampling.{name}", None, limit) from None
    structure = params.structured_output
    if structure is None:
        return
    try:
        if structure.kind == "choice":
            message.structured_output.choice.texts.extend(structure.choices)
            message.structured_output.choice.SetInParent()
        elif structure.kind == "json_object":
            message.structured_output.json_object = True
        else:
            setattr(message.structured_output, structure.kind, structure.value)
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument("sampling.structured_output", None, "must be a StructuredOutput of valid text") from None


_WIRE_LIMITS = dict.fromkeys(
    ("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs"), "must be a whole number in 0 … 2**32-1"
) | {"seed": "must be a whole number in 0 … 2**64-1"}


def validate_sampling(
    params: SamplingParams, *, vocab_size: int, max_model_len: int, max_logprobs: int = MAX_LOGPROBS
) -> None:
    """Raises InvalidArgument for the first bad field.

    `max_tokens` above what fits into the context is no error here: the router clamps it.
    """
    _check_counts(params, max_model_len, max_logprobs)
    _check_range("temperature", params.temperature, low=0.0)
    _check_range("top_p", params.top_p, low=0.0, high=1.0, open_low=True)
    _check_range("min_p", params.min_p, low=0.0, high=1.0)
    _check_range("repetition_penalty", params.repetition_penalty, low=0.0, open_low=True)
    _check_range("presence_penalty", params.presence_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
    _check_range("frequency_penalty", params.frequency_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
    if params.seed is not None and not 0 <= params.seed <= _MAX_SEED:
        raise InvalidArgument("sampling.seed", params.seed, "must be in 0 … 2**64-1")
    _check_token_ids(params, vocab_size)
    _check_constraints(params, vocab_size)
    if params.structured_output is not None:
        _check_structure(params, params.structured_output)


def _check_counts(params: SamplingParams, max_model_len: int, max_logprobs: int) -> None:
    if not 1 <= params.n <= MAX_CHOICES:
        raise InvalidArgument("sampling.n", params.n, f"must be in 1 … {MAX_CHOICES}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidArgument("sampling.max_tokens", params.max_tokens, "must be at least 1")
    if params.min_tokens < 0:
        raise InvalidArgument("sampling.min_tokens", params.min_tokens, "must be at least 0")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        limit = f"must be at most sampling.max_tokens = {params.max_tokens}"
        raise InvalidArgument("sampling.min_tokens", params.min_tokens, limit)
    if params.min_tokens >= max_model_len:
        limit = f"must be below the model's context length of {max_model_len} tokens"
        raise InvalidArgument("sampling.min_tokens", params.min_tokens, limit)
    if not 0 <= params.top_k <= _MAX_UINT32:
        raise InvalidArgument("sampling.top_k", params.top_k, "must be in 0 … 2**32-1 (0 keeps all tokens)")
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and not 0 <= value <= max_logprobs:
            raise InvalidArgument(f"sampling.{name}", value, f"must be in 0 … {max_logprobs}")


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    in_vocabulary = f"must be a token id below the vocabulary size of {vocab_size}"
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        limit = f"has {len(params.logit_bias)} entries, must have at most {MAX_LOGIT_BIAS}"
        raise InvalidArgument("sampling.logit_bias", None, limit)
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument("sampling.logit_bias", token_id, in_vocabulary)
        _check_range(f"logit_bias[{token_id}]", bias, low=-MAX_BIAS, high=MAX_BIAS)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        limit = f"has {len(params.stop_token_ids)} entries, must have at most {MAX_STOP_TOKEN_IDS}"
        raise InvalidArgument("sampling.stop_token_ids", None, limit)
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument("sampling.stop_token_ids", token_id, in_vocabulary)


def _check_constraints(params: SamplingParams, vocab_size: int) -> None:
    in_vocabulary = f"must be a token id below the vocabulary size of {vocab_size}"
    allowed, words = params.allowed_token_ids, params.bad_words_token_ids
    if len(allowed) > MAX_ALLOWED_TOKEN_IDS:
        limit = f"has {len(allowed)} entries, must have at most {MAX_ALLOWED_TOKEN_IDS}"
        raise InvalidArgument("sampling.allowed_token_ids", None, limit)
    if allowed and not 0 <= min(allowed) <= max(allowed) < vocab_size:
        bad = next(token_id for token_id in allowed if not 0 <= token_id < vocab_size)
        raise InvalidArgument("sampling.allowed_token_ids", bad, in_vocabulary)
    if len(words) > MAX_BAD_WORDS:
        limit = f"has {len(words)} entries, must have at most {MAX_BAD_WORDS}"
        raise InvalidArgument("sampling.bad_words_token_ids", None, limit)
    for number, word in enumerate(words):
        field = f"sampling.bad_words_token_ids[{number}]"
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidArgument(field, len(word), f"must have 1 … {MAX_BAD_WORD_TOKENS} tokens")
        for token_id in word:
            if not 0 <= token_id < vocab_size:
                raise InvalidArgument(field, token_id, in_vocabulary)


def _check_structure(params: SamplingParams, structure: StructuredOutput) -> None:
    """Its size and its company; whether it is a grammar at all is said by whoever compiles it."""
    field = f"sampling.structured_output.{structure.kind}"
    texts = structure.choices if structure.kind == "choice" else (structure.value,)
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_STRUCTURE_BYTES:
        raise InvalidArgument(field, None, f"has {size} bytes, must have at most {MAX_STRUCTURE_BYTES}")
    if structure.kind == "choice" and not 1 <= len(texts) <= MAX_STRUCTURE_CHOICES:
        raise InvalidArgument(field, len(texts), f"must be 1 … {MAX_STRUCTURE_CHOICES} texts")
    if structure.kind != "json_object" and not all(texts):
        raise InvalidArgument(field, "", "must not be empty")
    # Together they could leave nothing to draw, or never end.
    for name, is_set in (
        ("allowed_token_ids", params.allowed_token_ids),
        ("bad_words_token_ids", params.bad_words_token_ids),
        ("min_tokens", params.min_tokens),
        ("ignore_eos", params.ignore_eos),
    ):
        if is_set:
            raise InvalidArgument(f"sampling.{name}", None, "is not supported together with structured_output")


def _check_range(name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """A NaN fails every comparison, so it is caught too; so is an infinity where there is no upper limit."""
    above = value > low if open_low else value >= low
    if above and value <= high and math.isfinite(value):
        return
    if math.isinf(high):
        limit = f"must be finite and {'above' if open_low else 'at least'} {low:g}"
    else:
        limit = f"must be in {'(' if open_low else '['}{low:g}, {high:g}]"
    raise InvalidArgument(f"sampling.{name}", value, limit)
