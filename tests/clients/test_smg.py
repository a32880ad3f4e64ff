"""The unmodified `smg` gateway over our router as one worker: the same tokens as our own client's, and nothing left."""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from pagewire import Client
from tests.clients.conftest import Served
from tests.clients.smg_gateway import SmgGateway

PROMPT = "the rain in Spain"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def gateway(client_cluster: Served) -> Iterator[SmgGateway]:
    with SmgGateway("--worker-urls", f"grpc://{client_cluster.cluster.target}") as gateway:
        yield gateway


@pytest.fixture
def client(gateway: SmgGateway, served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def grpc(served: Served) -> Iterator[Client]:
    with Client(served.cluster.target) as client:
        yield client


def prompt_ids(grpc: Client) -> list[int]:
    """As the gateway tokenizes completions: without special tokens."""
    return list(grpc.tokenize(PROMPT, add_special_tokens=False))


def test_greedy_completion(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(prompt_ids(grpc), temperature=0, max_tokens=24, ignore_eos=True)
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids(grpc)), 24)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == wanted.usage.prompt_tokens // 4 * 4


def test_streamed_chat(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(chat=MESSAGES, temperature=0, max_tokens=20)
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert len(chunks) > 3  # the role, texts (of several tokens on a busy machine), the end
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage is not None
    assert last.usage.completion_tokens == len(wanted.token_ids)


def test_seed_penalties_and_stop_string(client: OpenAI, grpc: Client) -> None:
    sampling: dict[str, Any] = {"seed": 7, "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5}
    wanted = grpc.complete(chat=MESSAGES, max_tokens=24, **sampling)
    (stop,) = re.findall(r"[a-z]{2}", wanted.text)[1:2]
    stopped = grpc.complete(chat=MESSAGES, max_tokens=24, stop=[stop], **sampling)
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 24, **sampling}
    assert client.chat.completions.create(**asked).choices[0].message.content == wanted.text
    choice = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (stopped.text, "stop")


def test_two_choices_with_logprobs(client: OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(chat=MESSAGES, max_tokens=8, seed=3, n=2, logprobs=2)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=8, seed=3, n=2, logprobs=True, top_logprobs=2
    )
    for choice, own in zip(answer.choices, wanted.choices, strict=True):
        assert choice.message.content == own.text
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        got = [entry.logprob for entry in choice.logprobs.content]
        assert got == pytest.approx([each.logprob for each in own.logprobs], abs=1e-5)
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * len(own.logprobs)


def test_errors_reach_the_client(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.completions.create(model="tiny", prompt="x " * 400, max_tokens=4)
    with pytest.raises(openai.BadRequestError, match=r"stop_token_ids.*vocabulary size of 300"):
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"stop_token_ids": [9999]})
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="other", prompt=PROMPT)
    assert caught.value.status_code == 404


def test_a_client_that_goes_leaves_nothing(client: OpenAI, served: Served) -> None:
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    served.cluster.wait_quiet()
