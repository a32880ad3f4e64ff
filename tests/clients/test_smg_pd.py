"""The unmodified `smg` gateway in its own PD mode over our workers: prefill's KV reaches decode, the tokens are ours.

Other than we, the gateway drops the bytes of a character that the end cut off, and their tokens' log-probabilities.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from pagewire import Client
from pagewire.v1 import types_pb2
from tests.clients.conftest import Served
from tests.clients.smg_gateway import SmgGateway

PROMPT = "a rainy day in Spain, and then another one"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def gateway(client_cluster: Served) -> Iterator[SmgGateway]:
    prefill = client_cluster.endpoint(types_pb2.WORKER_ROLE_PREFILL)
    decode = client_cluster.endpoint(types_pb2.WORKER_ROLE_DECODE)
    workers = ("--pd-disaggregation", "--prefill", f"grpc://{prefill}", "--decode", f"grpc://{decode}")
    with SmgGateway(*workers, "--prefill-policy", "cache_aware", "--decode-policy", "round_robin") as gateway:
        yield gateway


@pytest.fixture
def client(gateway: SmgGateway, served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def grpc(served: Served) -> Iterator[Client]:
    with Client(served.cluster.target) as client:
        yield client


def whole_characters(text: str | None) -> str:
    return (text or "").rstrip("\ufffd")


def test_greedy_completion_with_its_kv_from_prefill(client: OpenAI, grpc: Client, served: Served) -> None:
    prompt = list(grpc.tokenize(PROMPT, add_special_tokens=False))
    wanted = grpc.complete(prompt, temperature=0, max_tokens=24, ignore_eos=True)
    served.cluster.reset_caches()
    before = served.metrics("decode")
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted.text, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    after = served.metrics("decode")
    num_blocks = after["pagewire:transfer_blocks_total"] - before["pagewire:transfer_blocks_total"]
    assert num_blocks == -(-len(prompt) // 4)
    assert after["pagewire:prefill_tokens_on_decode_total"] == before["pagewire:prefill_tokens_on_decode_total"]
    # Prefill's own hits are what is reported.
    again = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert again.choices[0].text == wanted.text
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == min(len(prompt) // 4 * 4, len(prompt) - 1)


@pytest.mark.parametrize("num_words", range(8))
def test_chat_of_every_length_modulo_the_block(client: OpenAI, grpc: Client, num_words: int) -> None:
    messages: Any = [{"role": "user", "content": "q" * num_words}]
    wanted = grpc.complete(chat=messages, temperature=0, max_tokens=10, logprobs=1)
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 10}
    choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1).choices[0]
    assert whole_characters(choice.message.content) == whole_characters(wanted.text)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    got = [entry.logprob for entry in choice.logprobs.content]
    assert got == pytest.approx([each.logprob for each in wanted.choices[0].logprobs[: len(got)]], abs=1e-5)
    assert len(got) >= len(whole_characters(wanted.text)) // 2
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole_characters(streamed) == whole_characters(wanted.text)


def test_seeded_sampling_and_two_choices(client: OpenAI, grpc: Client) -> None:
    sampling: dict[str, Any] = {"seed": 11, "temperature": 0.9, "top_p": 0.95}
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 16, **sampling}
    one = grpc.complete(chat=MESSAGES, max_tokens=16, **sampling)
    assert client.chat.completions.create(**asked).choices[0].message.content == one.text
    two = grpc.complete(chat=MESSAGES, max_tokens=16, n=2, **sampling)
    answer = client.chat.completions.create(**asked, n=2)
    assert [choice.message.content for choice in answer.choices] == [choice.text for choice in two.choices]


def test_errors_reach_the_client_and_leave_no_ticket(client: OpenAI, served: Served) -> None:
    num_expired = served.metrics("prefill")["pagewire:leases_expired_total"]
    with pytest.raises(openai.BadRequestError, match=r"stop_token_ids.*vocabulary size of 300"):
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"stop_token_ids": [9999]})
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.completions.create(model="tiny", prompt="x " * 400, max_tokens=4)
    served.cluster.wait_quiet()
    assert served.metrics("prefill")["pagewire:leases_expired_total"] == num_expired


def test_a_client_that_goes_leaves_nothing(client: OpenAI, served: Served) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "stream": True}
    stream = client.completions.create(**asked, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    served.cluster.wait_quiet()


def test_many_at_once(client: OpenAI, grpc: Client) -> None:
    """B11: more than the pools hold; tickets wait for decode, prompts for tickets, and everybody ends."""
    prompts = [f"{number} {PROMPT}" for number in range(8)]
    wanted = {
        prompt: grpc.complete(grpc.tokenize(prompt, add_special_tokens=False), temperature=0, max_tokens=8).text
        for prompt in prompts
    }

    def ask(prompt: str) -> bool:
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8)
        return whole_characters(answer.choices[0].text) == whole_characters(wanted[prompt])

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, prompts * 6))


def test_what_the_first_leg_says_reaches_the_client(client_cluster: Served) -> None:
    """B10: an error of the prefill leg is not a hang of the decode leg. (Here each gets the other's worker.)"""
    prefill, decode = (
        f"grpc://{client_cluster.endpoint(role)}"
        for role in (types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE)
    )
    with (
        SmgGateway("--pd-disaggregation", "--prefill", decode, "--decode", prefill, is_broken=True) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
        pytest.raises(openai.BadRequestError, match="do_remote_decode is for prefill workers"),
    ):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4)
