"""What is sent: token ids drawn at random, or a file of prompts. Pure but for reading the file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewire.benchmark.options import ServeBenchOptions
from pagewire.config import ConfigError


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages of one request."""

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send: text, token ids or messages, and the output's length in tokens."""

    prompt: str | tuple[int, ...] | Chat
    output_len: int


TokenIds = NDArray[np.int64]


def make_samples(options: ServeBenchOptions, vocabulary: TokenIds, random: np.random.Generator) -> list[Sample]:
    """`options.num_prompts` samples (of a short file with --no-oversample: fewer); prompts of `vocabulary`'s ids.

    Raises ConfigError for a file that has something else.
    """
    if options.dataset_name == "custom":
        return _custom(options, random)
    if options.dataset_name == "random":
        return _random(options, vocabulary, random)
    return _prefix_repetition(options, vocabulary, random)


def check_lengths(samples: Iterable[Sample], max_model_len: int | None) -> None:
    """Raises ConfigError for the first sample of token ids that is too long for the model."""
    for number, sample in enumerate(samples):
        if max_model_len is None or not isinstance(sample.prompt, tuple):
            continue
        if len(sample.prompt) + sample.output_len > max_model_len:
            raise ConfigError(
                f"prompt {number} has {len(sample.prompt)} tokens and asks for {sample.output_len} more, together more "
                f"than the model's limit of {max_model_len}: lower the input or output length"
            )


def _random(options: ServeBenchOptions, vocabulary: TokenIds, random: np.random.Generator) -> list[Sample]:
    prefix = _draw(vocabulary, options.random_prefix_len, random)
    num, ratio = options.num_prompts, options.random_range_ratio
    inputs = _lengths(options.input_len or options.random_input_len, ratio, num, random)
    outputs = _lengths(options.output_len or options.random_output_len, ratio, num, random)
    return [
        Sample((*prefix, *_draw(vocabulary, length, random)), output_len)
        for length, output_len in zip(inputs, outputs, strict=True)
    ]


def _lengths(mean: int, ratio: float, num: int, random: np.random.Generator) -> list[int]:
    low, high = max(1, int(np.floor(mean * (1 - ratio)))), int(np.ceil(mean * (1 + ratio)))
    return [int(length) for length in random.integers(low, high, num, endpoint=True)]


def _prefix_repetition(options: ServeBenchOptions, vocabulary: TokenIds, random: np.random.Generator) -> list[Sample]:
    """Every prefix equally often (one more for some where it does not divide), in random order."""
    num_prefixes = options.prefix_repetition_num_prefixes
    if num_prefixes > options.num_prompts:
        raise ConfigError(
            f"prefix-repetition-num-prefixes = {num_prefixes}: must be at most num-prompts, {options.num_prompts}"
        )
    prefixes = [_draw(vocabulary, options.prefix_repetition_prefix_len, random) for _ in range(num_prefixes)]
    output_len = options.output_len or options.prefix_repetition_output_len
    suffix_len = options.prefix_repetition_suffix_len
    order = random.permutation(np.arange(options.num_prompts) % num_prefixes)
    return [Sample((*prefixes[at], *_draw(vocabulary, suffix_len, random)), output_len) for at in order]


def _draw(vocabulary: TokenIds, length: int, random: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in random.choice(vocabulary, length))


def _custom(options: ServeBenchOptions, random: np.random.Generator) -> list[Sample]:
    path = options.dataset_path
    assert path is not None
    output_len = options.output_len or options.custom_output_len
    with path.open(encoding="utf-8") as file:
        samples = [
            _of_line(line, f"{path}, line {number}", output_len, is_chat=options.is_chat)
            for number, line in enumerate(file, 1)
            if line.strip()
        ]
    if not samples:
        raise ConfigError(f"{path}: has no prompts")
    if not options.disable_shuffle:
        samples = [samples[at] for at in random.permutation(len(samples))]
    if options.no_oversample or len(samples) >= options.num_prompts:
        return samples[: options.num_prompts]
    return [samples[at % len(samples)] for at in range(options.num_prompts)]


def _of_line(line: str, where: str, output_len: int, *, is_chat: bool) -> Sample:
    """`{"prompt": text or token ids}` or `{"messages": […]}`, with "output_tokens" if it likes."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is no JSON: {error}") from None
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        raise ConfigError(f'{where}: must be an object with either "prompt" or "messages"')
    own = item.get("output_tokens", output_len)
    if not isinstance(own, int) or isinstance(own, bool) or own < 1:
        hint = "" if "output_tokens" in item else " (custom-output-len is -1 and it is missing)"
        raise ConfigError(f"{where}: output_tokens = {own!r}: must be a whole number from 1 on{hint}")
    return Sample(_messages(item, where) if is_chat else _prompt(item, where), own)


def _prompt(item: dict[str, Any], where: str) -> str | tuple[int, ...]:
    prompt = item.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and _all_ids(prompt):
        return tuple(prompt)
    raise ConfigError(f"{where}: prompt must be text or token ids; messages need a -chat backend")


def _messages(item: dict[str, Any], where: str) -> Chat:
    messages = item.get("messages", [{"role": "user", "content": item.get("prompt")}])
    is_good = isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in messages
    )
    if not is_good or not messages:
        raise ConfigError(f'{where}: must be messages {{"role": …, "content": …}}, or a prompt of text')
    return Chat(tuple(messages))


def _all_ids(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
