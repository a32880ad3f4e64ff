"""Every bad input gets its gRPC code and an error that names field, value and limit; the server still serves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.e2e.cluster import Cluster

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN = float("nan")
MAX_MODEL_LEN = 256


def tokens(n: int) -> inference_pb2.TokenPrompt:
    return inference_pb2.TokenPrompt(token_ids=[7] * n)


# name: (request fields, code, field in the details, what the message names)
BAD: dict[str, tuple[dict[str, object], grpc.StatusCode, str, tuple[str, ...]]] = {
    "no prompt": ({}, INVALID, "prompt", ()),
    "empty text": ({"text": ""}, INVALID, "text", ()),
    "empty token list": ({"tokens": tokens(0)}, INVALID, "tokens.token_ids", ()),
    "empty chat": ({"chat": inference_pb2.ChatPrompt()}, INVALID, "chat.messages", ()),
    "id out of range": (
        {"tokens": inference_pb2.TokenPrompt(token_ids=[5, 300])}, INVALID, "tokens.token_ids[1]", ("300",),
    ),
    "longer than the model": ({"tokens": tokens(MAX_MODEL_LEN)}, INVALID, "tokens.token_ids", ("256",)),
    "much longer than the model": ({"tokens": tokens(100_000)}, INVALID, "tokens.token_ids", ("100000", "256")),
    "two million tokens (G15)": ({"tokens": tokens(2_000_000)}, INVALID, "tokens.token_ids", ("2000000", "256")),
    "prompt and output over the limit": (
        {"tokens": tokens(200), "sampling": types_pb2.SamplingParams(max_tokens=57)},
        INVALID, "sampling.max_tokens", ("57", "200", "256"),
    ),
    "5 MB of text": ({"text": "a" * 5_000_000}, INVALID, "text", ("5000000",)),
    "unknown model": ({"text": "a", "model": "gpt-9"}, grpc.StatusCode.NOT_FOUND, "", ("gpt-9", "tiny")),
    "unknown adapter": ({"text": "a", "adapter": "x"}, grpc.StatusCode.NOT_FOUND, "", ("x",)),
    "template kwargs": (
        {"chat": inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", content="a")], template_kwargs_json="{")},
        INVALID, "chat.template_kwargs_json", (),
    ),
    "salt too long": ({"text": "a", "cache_salt": "s" * 257}, INVALID, "cache_salt", ("257", "256")),
    "empty stop string": (
        {"text": "a", "text_options": inference_pb2.TextOptions(stop=[""])}, INVALID, "text_options.stop[0]", (),
    ),
    "too many stop strings": (
        {"text": "a", "text_options": inference_pb2.TextOptions(stop=["x"] * 17)},
        INVALID, "text_options.stop", ("17", "16"),
    ),
}  # fmt: skip
BAD_SAMPLING: dict[str, tuple[dict[str, object], str, tuple[str, ...]]] = {
    "negative temperature": ({"temperature": -1.0}, "temperature", ("-1",)),
    "NaN temperature": ({"temperature": NAN}, "temperature", ("nan",)),
    "infinite temperature": ({"temperature": float("inf")}, "temperature", ("inf",)),
    "top_p 0": ({"top_p": 0.0}, "top_p", ("0",)),
    "top_p over 1": ({"top_p": 1.5}, "top_p", ("1.5", "1")),
    "NaN top_p": ({"top_p": NAN}, "top_p", ("nan",)),
    "min_p over 1": ({"min_p": 2.0}, "min_p", ("2", "1")),
    "repetition_penalty 0": ({"repetition_penalty": 0.0}, "repetition_penalty", ("0",)),
    "presence_penalty 3": ({"presence_penalty": 3.0}, "presence_penalty", ("3", "2")),
    "frequency_penalty NaN": ({"frequency_penalty": NAN}, "frequency_penalty", ("nan",)),
    "n too large": ({"n": 65}, "n", ("65", "64")),
    "n 0": ({"n": 0}, "n", ("0",)),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", ("0",)),
    "min_tokens over max_tokens": ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ("5", "4")),
    "logprobs 21": ({"logprobs": 21}, "logprobs", ("21", "20")),
    "bias on an id out of range": ({"logit_bias": {300: 1.0}}, "logit_bias", ("300",)),
    "bias too large": ({"logit_bias": {3: 101.0}}, "logit_bias[3]", ("101", "100")),
    "stop id out of range": ({"stop_token_ids": [300]}, "stop_token_ids", ("300",)),
}


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with grpc.insecure_channel(cluster.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield stub
        good = inference_pb2.GenerateRequest(
            text="hello", sampling=types_pb2.SamplingParams(max_tokens=2, temperature=0)
        )
        assert list(stub.Generate(good, timeout=30))[-1].done, "the server still serves"


def refused(stub: inference_pb2_grpc.InferenceServiceStub, request: inference_pb2.GenerateRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=30))
    return caught.value


def fields(error: grpc.RpcError) -> list[str]:
    status = rpc_status.from_call(error)
    assert status is not None, "rich status"
    found = []
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found += [v.field for v in bad.field_violations]
    return found


@pytest.mark.parametrize("name", BAD)
def test_bad_request(name: str, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    request, code, field, names = BAD[name]
    error = refused(stub, inference_pb2.GenerateRequest(**request))
    assert error.code() == code, error.details()
    assert all(n in error.details() for n in names), error.details()
    if field:
        assert fields(error) == [field]


@pytest.mark.parametrize("name", BAD_SAMPLING)
def test_bad_sampling(name: str, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    sampling, field, names = BAD_SAMPLING[name]
    error = refused(stub, inference_pb2.GenerateRequest(text="a", sampling=types_pb2.SamplingParams(**sampling)))
    assert error.code() == INVALID, error.details()
    assert fields(error) == [f"sampling.{field}"]
    assert all(n in error.details().lower() for n in names), error.details()


def test_invalid_utf8(cluster: Cluster, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """A string field with bytes that are no UTF-8 never becomes a request."""
    raw = inference_pb2.GenerateRequest(text="ab").SerializeToString().replace(b"ab", b"\xff\xfe")
    with grpc.insecure_channel(cluster.target) as channel:
        call = channel.unary_stream("/pagewire.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(raw, timeout=10))
    assert caught.value.code() == INVALID
    assert fields(caught.value) == ["request"]


def test_longer_than_a_message_may_be(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """CASES G15: a bounded message size, said by number."""
    error = refused(stub, inference_pb2.GenerateRequest(text="a" * (40 << 20)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max" in error.details()


@pytest.mark.parametrize("length", [MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1])
def test_the_longest_prompts_are_served(length: int, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """CASES E6: the boundary is exact, and an omitted max_tokens (CASES G8) is what fits."""
    request = inference_pb2.GenerateRequest(
        tokens=tokens(length), sampling=types_pb2.SamplingParams(temperature=0, ignore_eos=True)
    )
    messages = list(stub.Generate(request, timeout=60))
    assert messages[-1].usage.completion_tokens == MAX_MODEL_LEN - length
    assert [m.finish_reason for m in messages if m.finish_reason] == [types_pb2.FINISH_REASON_LENGTH]


def test_longer_than_the_pool(zygote: Zygote, tiny_model: Callable[..., Path], valkey_url: str, tmp_path: Path) -> None:
    """A pool of 16 blocks lowers the model's limit to 64 tokens; what is longer is refused with that number."""
    block_bytes = 3 * 2 * 2 * 4 * 16 * 4  # layers, K and V, kv heads, tokens, head size, float32
    flags = ("--kv-cache-memory-bytes", str(16 * block_bytes))
    with System.forked(zygote, tiny_model("llama"), tmp_path, *flags, redis_url=valkey_url) as cluster:
        with grpc.insecure_channel(cluster.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for length in (64, 65, 500):
                error = refused(stub, inference_pb2.GenerateRequest(tokens=tokens(length)))
                assert error.code() == INVALID
                assert fields(error) == ["tokens.token_ids"]
                assert str(length) in error.details()
                assert "64" in error.details()
            sampling = types_pb2.SamplingParams(temperature=0, ignore_eos=True)
            longest = inference_pb2.GenerateRequest(tokens=tokens(63), sampling=sampling)
            assert list(stub.Generate(longest, timeout=30))[-1].usage.completion_tokens == 1
        cluster.wait_quiet()
        cluster.stop()
