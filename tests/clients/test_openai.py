"""OpenAI's own SDK against real processes: what it makes of our answers equals what our gRPC client gets."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pagewire import Client
from tests.clients.conftest import Served

PROMPT = "the rain in Spain"
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.http_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.http_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
    # The SDK looks up its platform in a thread of the loop's executor, which would outlive the test.
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.fixture
def grpc(served: Served) -> Iterator[Client]:
    with Client(served.cluster.target) as client:
        yield client


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "pagewire")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_greedy_completion_equals_grpc(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=24, ignore_eos=True)
    body = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, extra_body=body)
    (choice,) = answer.choices
    assert choice.text == wanted.text
    assert choice.model_extra is not None
    assert tuple(choice.model_extra["token_ids"]) == tuple(wanted.token_ids)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(grpc.tokenize(PROMPT)) == len(choice.model_extra["prompt_token_ids"])
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (24, 24 + answer.usage.prompt_tokens)
    by_ids = client.completions.create(
        model="tiny", prompt=grpc.tokenize(PROMPT), temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert by_ids.choices[0].text == wanted.text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens_details is not None
    assert by_ids.usage.prompt_tokens_details.cached_tokens


def test_streamed_completion_equals_grpc(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=24, ignore_eos=True)
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text
    token_ids = [t for chunk in chunks for t in (chunk.choices[0].model_extra or {}).get("token_ids", [])]
    assert token_ids == list(wanted.token_ids)
    assert len(chunks) > 1
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24


def test_chat_and_its_streams_equal_grpc(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(chat=MESSAGES, temperature=0, max_tokens=20)
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
    (choice,) = client.chat.completions.create(**asked).choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == wanted.text
    assert [chunk.delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert chunks[-1].finish_reason == choice.finish_reason
    # The SDK's accumulator takes an answer that ran into its length for an error.
    stop = wanted.text[8:10]
    with client.chat.completions.stream(**asked, stop=stop) as stream:
        (final,) = stream.get_final_completion().choices
    assert (final.message.content, final.finish_reason) == (wanted.text[: wanted.text.index(stop)], "stop")


def test_choices_and_seeds_equal_grpc(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(PROMPT, n=3, seed=7, temperature=1.2, top_p=0.9, max_tokens=12)
    texts = [choice.text for choice in wanted.choices]
    assert len(set(texts)) == 3
    for _ in range(2):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, n=3, seed=7, temperature=1.2, top_p=0.9, max_tokens=12
        )
        assert [choice.text for choice in answer.choices] == texts


def test_lists_of_prompts(client: OpenAI, grpc: Client) -> None:
    prompts = ["one", "two", "three"]
    answer = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=8)
    wanted = [grpc.complete(prompt, temperature=0, max_tokens=8).text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == wanted
    ids = [grpc.tokenize(prompt) for prompt in prompts]
    answer = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=8)
    assert [choice.text for choice in answer.choices] == wanted


def test_logprobs(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(PROMPT, temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    ignore = {"ignore_eos": True}
    (choice,) = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=2, extra_body=ignore
    ).choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([item.logprob for item in wanted.logprobs])
    assert choice.logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    assert len(choice.logprobs.tokens or []) == len(choice.logprobs.text_offset or []) == 6
    (chat,) = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    ).choices
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    for token in chat.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob  # greedy
        assert bytes(token.bytes or []).decode(errors="replace") == token.token


def test_stop_and_bias(client: OpenAI, grpc: Client) -> None:
    text = grpc.complete(PROMPT, temperature=0, max_tokens=24, ignore_eos=True).text
    stop = text[5:7]
    (choice,) = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, stop=[stop], extra_body={"ignore_eos": True}
    ).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    (token_id,) = grpc.tokenize("z")[1:]
    (choice,) = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=4, logit_bias={str(token_id): 100}
    ).choices
    assert choice.text == "zzzz"


def test_errors_are_the_sdks_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[9] * 300)
    assert long.value.code == "context_length_exceeded"
    for refused, param in (
        ({"functions": [{"name": "f", "parameters": {}}]}, "functions"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
         "response_format"),
        ({"extra_body": {"guided_json": {"type": "nothing"}}}, "guided_json"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}],
          "tool_choice": "required"}, "tools"),
        ({"extra_body": {"allowed_token_ids": [5], "bad_words": ["!"]}}, "allowed_token_ids"),
        ({"extra_body": {"guided_grammar": "root ::= root"}}, "guided_grammar"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as unsupported:
            client.chat.completions.create(model="tiny", messages=MESSAGES, **refused)
        assert unsupported.value.param == param


async def test_a_stream_that_is_left_frees_everything(async_client: AsyncOpenAI, served: Served) -> None:
    """`served` waits until no block is referenced, which 200 more tokens would delay."""
    stream = await async_client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    running = asyncio.create_task(
        async_client.completions.create(model="tiny", prompt=PROMPT, max_tokens=200, extra_body={"ignore_eos": True})
    )
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.to_thread(served.cluster.wait_quiet)


async def test_many_at_once(async_client: AsyncOpenAI, grpc: Client) -> None:
    prompts = [f"number {number}" for number in range(8)]

    async def complete(prompt: str) -> str:
        answer = await async_client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=10)
        return answer.choices[0].text

    texts = await asyncio.gather(*(complete(prompt) for prompt in prompts))
    assert texts == [grpc.complete(prompt, temperature=0, max_tokens=10).text for prompt in prompts]
