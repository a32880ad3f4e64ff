"""Features that the router's HTTP API adds to a text (tools, reasoning, echo), and their answers in one process."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offline.local import LocalBackend
from router.http.chat import ChatCompletions
from router.http.completions import Completions
from router.model import ModelFacts
from tests.decode_svc.harness import make_engine

_WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 120, "seed": 5}
_TOOLS = {**_CHAT, "tools": [{"type": "function", "function": _WEATHER}]}
_THOUGHT = '<think>hm, well</think>So. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
_PROMPT = {"model": "tiny", "prompt": "the rain in Spain", "max_tokens": 12, "seed": 7, "ignore_eos": True}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}

HTTP_FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "tool call": ("chat/completions", {**_TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
    "reasoning and a tool call": (
        "chat/completions", {**_TOOLS, "structured_outputs": {"choice": [_THOUGHT]}, "logprobs": True},
    ),
    "response_format": (
        "chat/completions",
        {**_CHAT, "n": 2, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
    ),
    "echo": ("completions", {**_PROMPT, "echo": True, "logprobs": 2}),
    "echo of one of four": ("completions", {**_PROMPT, "echo": True, "n": 1, "best_of": 4, "stop": ["!"]}),
    "echoed beams": (
        "completions", {**_PROMPT, "echo": True, "logprobs": 1, "use_beam_search": True, "num_beams": 3, "n": 2},
    ),
}  # fmt: skip


def choices_of(answer: Mapping[str, Any]) -> Any:
    """What must be equal: all of the choices but the random names of calls."""
    return [_plain(choice) for choice in answer["choices"]]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return np.float32(value)  # workers' numbers come by float32 wires
    return "call" if isinstance(value, str) and re.fullmatch("call_[0-9a-f]{24}", value) else value


async def http_answers(model: Path) -> dict[str, Any]:
    """Every feature's choices, by the endpoints over an engine in this process."""
    engine = make_engine(model, enable_prefix_caching=False, num_blocks=128)
    backend = LocalBackend(engine, ModelFacts.load(model, "tiny"))
    await backend.begin()
    try:
        endpoints = {"completions": Completions(backend), "chat/completions": ChatCompletions(backend)}
        return {
            name: choices_of(await (await endpoints[path].answer(body, {})).whole())
            for name, (path, body) in HTTP_FEATURES.items()
        }
    finally:
        await backend.end()
