"""Structured output, tools, reasoning, best_of, echo and prompt log-probabilities through OpenAI's own SDK."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from pagewire import Client
from tests.clients.conftest import Served
from tests.clients.test_openai import MESSAGES, PROMPT, TOOLS


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.http_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def grpc(served: Served) -> Iterator[Client]:
    with Client(served.cluster.target) as client:
        yield client


class Answer(BaseModel):
    """A form of which every random text ends soon."""

    kind: bool
    level: bool | None


def test_response_formats(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=150, seed=3, temperature=0.8
    )
    (choice,) = parsed.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Answer)
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "seed": 1}
    for extra, wanted in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_regex": "(ab){3}"}, ("ababab",)),
        ({"structured_outputs": {"grammar": 'root ::= "x" "y"'}}, ("xy",)),
    ):
        (choice,) = client.chat.completions.create(**asked, extra_body=extra).choices
        assert choice.message.content in wanted
        assert choice.finish_reason == "stop"
    text = {"type": "text"}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    assert client.chat.completions.create(**asked, response_format=text).choices[0].message.content == plain


def test_tools_that_are_demanded(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150, "seed": 5}
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = client.chat.completions.create(**asked, tool_choice=named).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Rome")
    # The same as a stream, put together by the SDK.
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        (final,) = stream.get_final_completion().choices
    (streamed,) = final.message.tool_calls or []
    assert json.loads(streamed.function.arguments) == arguments
    assert final.finish_reason == "tool_calls"
    required = client.chat.completions.create(
        **asked, tool_choice="required", parallel_tool_calls=False, temperature=0.7
    ).choices[0]
    (one,) = required.message.tool_calls or []
    assert one.type == "function"
    assert one.function.name in ("weather", "stop")
    # The conversation goes on with the call and its result.
    follow_up = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=follow_up, tools=TOOLS, max_tokens=4)
    assert answer.usage is not None


def test_reasoning_and_calls_that_the_model_wants(client: OpenAI) -> None:
    """The model's text is forced, so that a random model thinks and calls."""
    text = '<think>hm</think>Well. <tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    asked: Any = {
        "model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150, "logprobs": True,
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    message: Any = choice.message
    assert (message.reasoning_content, message.content) == ("hm", "Well. ")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("stop", "{}")]
    assert choice.finish_reason == "tool_calls"
    reasoning, content, arguments, names, num_logprobs = "", "", "", [], 0
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        for call in delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
        if chunk.choices[0].logprobs is not None:
            num_logprobs += len(chunk.choices[0].logprobs.content or [])
    assert (reasoning, content, names, arguments) == ("hm", "Well. ", ["stop"], "{}")
    assert choice.logprobs is not None
    assert num_logprobs == len(choice.logprobs.content or [])


def test_best_of(client: OpenAI, grpc: Client) -> None:
    drawn = grpc.complete(PROMPT, n=4, seed=9, max_tokens=8, ignore_eos=True, logprobs=0)
    means = [sum(item.logprob for item in choice.logprobs) / 8 for choice in drawn.choices]
    ranked = sorted(range(4), key=lambda number: -means[number])
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, n=2, best_of=4, seed=9, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in answer.choices] == [drawn.choices[number].text for number in ranked[:2]]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


def test_beam_search(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(PROMPT, num_beams=3, n=2, max_tokens=6, length_penalty=0.5)
    assert (wanted.choices[0].beam_score or 0) >= (wanted.choices[1].beam_score or 0)
    body = {"use_beam_search": True, "num_beams": 3, "length_penalty": 0.5}
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=6, extra_body=body)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in wanted.choices]
    del body["use_beam_search"]  # `num_beams` says it
    echoed = client.completions.create(
        model="tiny", prompt=PROMPT, n=2, max_tokens=6, echo=True, logprobs=2, stop=["zz"], extra_body=body
    )
    assert [choice.text for choice in echoed.choices] == [PROMPT + choice.text for choice in wanted.choices]
    num_prompt = len(grpc.tokenize(PROMPT))
    for choice, same in zip(echoed.choices, wanted.choices, strict=True):
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        assert len(values) == num_prompt + len(same.token_ids)
        assert sum(values[num_prompt:]) / len(same.token_ids) ** 0.5 == pytest.approx(same.beam_score, rel=1e-4)


def test_echo_and_prompt_logprobs(client: OpenAI, grpc: Client) -> None:
    ids = grpc.tokenize(PROMPT)
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=3, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    assert len(wanted.prompt_logprobs) == len(ids) - 1
    asked: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 1,
                  "extra_body": {"ignore_eos": True}}  # fmt: skip
    (choice,) = client.completions.create(**asked, max_tokens=3).choices
    assert choice.text == PROMPT + wanted.text
    assert choice.logprobs is not None
    values = [None, *(item.logprob for item in (*wanted.prompt_logprobs, *wanted.logprobs))]
    assert choice.logprobs.token_logprobs == pytest.approx(values)
    assert len(choice.logprobs.tokens or []) == len(choice.logprobs.text_offset or []) == len(ids) + 3
    assert (choice.logprobs.text_offset or [])[len(ids)] == len(PROMPT)
    alone = client.completions.create(**asked, max_tokens=0)
    assert alone.usage is not None
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (len(ids), 0)
    (only,) = alone.choices
    assert only.text == PROMPT
    assert only.logprobs is not None
    assert only.logprobs.token_logprobs == pytest.approx(values[: len(ids)])
    first, *_ = client.completions.create(**asked, max_tokens=3, stream=True)
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.token_logprobs == pytest.approx(values[: len(ids)])
    (chat,) = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 0}
    ).choices
    assert len((chat.model_extra or {})["prompt_logprobs"]) == len(ids)


def test_bad_words_and_truncation(client: OpenAI, grpc: Client) -> None:
    text = grpc.complete(PROMPT, temperature=0, max_tokens=12, ignore_eos=True).text
    word = next(char for char in text if char.isascii() and char.isalpha())
    body = {"bad_words": [word], "ignore_eos": True, "allowed_token_ids": list(range(5, 261))}
    asked: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    assert word not in client.completions.create(**asked, extra_body=body).choices[0].text
    ids = grpc.tokenize(PROMPT)
    short = grpc.complete(ids[-4:], temperature=0, max_tokens=5, ignore_eos=True)
    (choice,) = client.completions.create(
        model="tiny", prompt=ids * 40, temperature=0, max_tokens=5, echo=True,
        extra_body={"truncate_prompt_tokens": 4, "ignore_eos": True},
    ).choices  # fmt: skip
    assert choice.text == grpc.detokenize(ids[-4:]) + short.text
