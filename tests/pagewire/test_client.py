"""The Python client, sync and async, against a stub router on a real socket."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import pagewire
from pagewire import AsyncClient, Client, PagewireError
from pagewire.client import ModelInfo
from pagewire.errors import InvalidArgument
from pagewire.request_builder import build_generate_request
from pagewire.security import Security
from tests.pagewire.router_stub import StubRouter, running_stub


@pytest.fixture
def stub() -> Iterator[tuple[str, StubRouter]]:
    with running_stub() as running:
        yield running


@pytest.fixture
def client(stub: tuple[str, StubRouter]) -> Iterator[Client]:
    with Client(stub[0]) as client:
        yield client


@pytest.fixture
async def async_client(stub: tuple[str, StubRouter]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stub[0]) as client:
        yield client


def test_stream_and_last_chunk(client: Client) -> None:
    chunks = list(client.generate("héllo"))
    assert "".join(chunk.text for chunk in chunks) == "héllo"
    assert [chunk.index for chunk in chunks[:-1]] == [0, 1, 2, 3, 4]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["length", None]
    assert [chunk.done for chunk in chunks] == [False] * 5 + [True]
    assert chunks[0].usage is None
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 5, 16)


def test_complete_folds_choices(client: Client) -> None:
    completion = client.complete("abc", n=2, max_tokens=2, seed=5, logprobs=0)
    assert [choice.text for choice in completion.choices] == ["ab", "ab"]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("ab", (97, 98), "length")
    assert [entry.logprob for entry in completion.logprobs] == [-0.5, -0.5]
    assert (completion.seed, completion.prefill_worker, completion.decode_worker) == (5, "prefill-0", "decode-0")
    assert completion.timing.ttft_ms == 1.5


def test_every_form_of_prompt_and_every_option_arrives(client: Client, stub: tuple[str, StubRouter]) -> None:
    router = stub[1]
    assert client.complete([104, 105]).text == "hi"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert client.complete(chat=chat).text == "2:hi"
    client.complete("x", stop=["a", "b"], include_stop_str_in_output=True, skip_special_tokens=False, model="m",
                    cache_salt="salt", priority=-3, request_id="mine", top_k=5, logit_bias={3: 1.5},
                    stop_token_ids=[4])  # fmt: skip
    request = router.requests[-1]
    assert list(request.text_options.stop) == ["a", "b"]
    assert request.text_options.include_stop_str_in_output
    assert not request.text_options.skip_special_tokens
    assert (request.model, request.cache_salt, request.priority, request.request_id) == ("m", "salt", -3, "mine")
    assert (request.sampling.top_k, dict(request.sampling.logit_bias)) == (5, {3: 1.5})
    assert list(request.sampling.stop_token_ids) == [4]
    assert not request.sampling.HasField("max_tokens")
    client.complete("x", stop="abc")
    assert list(router.requests[-1].text_options.stop) == ["abc"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    client.complete(chat=chat, tools=tools)
    client.tokenize(chat=chat, tools=tools)
    assert [json.loads(r.chat.tools_json) for r in (router.requests[-1], router.tokenized[-1])] == [tools, tools]
    with pytest.raises(InvalidArgument, match="tools: are only for chat messages"):
        client.complete("x", tools=tools)


def test_tokenize_detokenize_and_list_models(client: Client) -> None:
    assert client.tokenize("ab") == [97, 98]
    assert client.detokenize([97, 98]) == "ab"
    with pytest.raises(InvalidArgument, match=r"^token_ids = \[-1\]: must be whole numbers"):
        client.detokenize([-1])
    assert client.list_models() == [ModelInfo("echo", 1000, 1000, has_chat_template=False, ready=True)]


async def test_async_client_does_the_same(async_client: AsyncClient) -> None:
    assert [chunk.text async for chunk in async_client.generate("ab")] == ["a", "b", ""]
    assert (await async_client.complete(chat=[{"role": "user", "content": "x"}])).text == "1:x"
    assert await async_client.tokenize("ab") == [97, 98]
    assert await async_client.detokenize([97, 98]) == "ab"
    assert [model.name for model in await async_client.list_models()] == ["echo"]
    with pytest.raises(PagewireError) as caught:
        await async_client.complete("x", temperature=-1)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_errors_have_code_message_and_details(client: Client) -> None:
    with pytest.raises(PagewireError) as caught:
        client.complete("!full")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.message == "queue is full (3 of 3)"
    assert [type(detail).__name__ for detail in caught.value.details] == ["RetryInfo", "QuotaFailure"]
    with pytest.raises(PagewireError, match=r"sampling.temperature = -1.0: must be finite and at least 0"):
        client.complete("x", temperature=-1.0)
    with pytest.raises(PagewireError, match="the stream ended before its last message"):
        client.complete("!cut")
    assert client.complete("x").text == "x"


def test_a_call_ends_at_its_timeout(client: Client) -> None:
    with pytest.raises(PagewireError) as caught:
        client.complete("!hang", timeout=0.3)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_leaving_the_loop_cancels_the_request(client: Client, stub: tuple[str, StubRouter]) -> None:
    stream = client.generate("!hang")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert stub[1].cancelled.wait(5)


async def test_leaving_the_async_loop_cancels_the_request(
    async_client: AsyncClient, stub: tuple[str, StubRouter]
) -> None:
    stream: Any = async_client.generate("!hang")
    await anext(stream)
    await stream.aclose()
    assert stub[1].cancelled.wait(5)


def test_without_a_server_a_call_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(PagewireError) as caught:
        client.complete("x")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "chat": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": "a\udcffb"}, "text"),
        ({"prompt": [-1]}, "tokens.token_ids"),
        ({"prompt": ["x"]}, "tokens.token_ids"),
        ({"chat": [{"role": "user"}]}, "chat.messages"),
        ({"prompt": "x", "temprature": 1.0}, "sampling"),
        ({"prompt": "x", "n": -1}, "sampling.n"),
        ({"prompt": "x", "stop": [3]}, "request"),
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_generate_request(**arguments)
    assert caught.value.field == field


def test_the_right_token_opens_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    with running_stub(Security(tokens=("secret",))) as (target, _):
        with Client(target, token="secret") as client:
            assert client.complete("x").text == "x"
            assert client.tokenize("a") == [97]
        with Client(target, token="wrong") as client, pytest.raises(PagewireError) as caught:
            client.complete("x")
        assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED


def test_lazy_exports() -> None:
    assert pagewire.Client is Client
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pagewire.nothing
