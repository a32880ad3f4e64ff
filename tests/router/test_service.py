"""The public API over real sockets: field by field, errors with their codes, and what the router imports."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import router.prompt
from kvstore.hashing import block_keys
from kvstore.redis_keys import index_keys
from pagewire import rpc
from pagewire.errors import from_rpc_error
from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from router.service import InferenceServicer
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import PROMPT, System, a_system, eventually, wanted

Request = inference_pb2.GenerateRequest


@asynccontextmanager
async def serving(directory: Path, **options: Any) -> AsyncIterator[tuple[System, Any, grpc.aio.Channel]]:
    """(system, stub, channel) of a router with one scripted prefill and decode worker."""
    options = {"prefills": [ScriptedPrefill()], "decodes": [ScriptedDecode()], **options}
    async with a_system(directory, **options) as system:
        server = rpc.build_server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(system.pipeline), server)
        port = rpc.bind(server, "127.0.0.1", 0)
        await server.start()
        try:
            async with rpc.channel(f"127.0.0.1:{port}") as channel:
                yield system, inference_pb2_grpc.InferenceServiceStub(channel), channel
        finally:
            await server.stop(None)


def tokens(*ids: int, **fields: Any) -> Request:
    fields.setdefault("sampling", types_pb2.SamplingParams(max_tokens=4))
    return Request(tokens=inference_pb2.TokenPrompt(token_ids=ids or PROMPT), **fields)


async def generate(stub: Any, request: Request) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in stub.Generate(request)]


async def test_the_session_and_the_prompts_keys_reach_the_placer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are long are hashed in the encoder's thread, before they are placed."""
    monkeypatch.setattr(router.prompt, "_INLINE_KEYS_TOKENS", 50)
    spaces = [(b"r" * 32, 4)]
    async with serving(tmp_path) as (system, stub, _):
        system.placer.spaces = spaces
        for num_tokens in (10, 110):
            ids = tuple(range(10, 20)) * (num_tokens // 10)
            call = stub.Generate(tokens(*ids, cache_salt="s"), metadata=(("x-session-id", "me"),))
            assert [response async for response in call][-1].done
            demand = system.placer.demands[-1]
            assert (demand.session_id, demand.prompt_token_ids) == ("me", ids)
            assert demand.keys is not None
            assert demand.keys.num_unprepared_tokens(spaces) == 0
            assert demand.keys.of(spaces[0]) == index_keys(block_keys(b"r" * 32, ids, 4, cache_salt="s"))


async def test_generate_field_by_field(tmp_path: Path) -> None:
    async with serving(tmp_path, prefills=[ScriptedPrefill(script=Script(num_cached=4))]) as (system, stub, _):
        request = tokens(request_id="mine")
        request.sampling.seed = 2**64 - 1
        request.sampling.logprobs = 0
        first, *middle, last = await generate(stub, request)
        text = system.pipeline.model.tokenizer.decode(wanted(4))
    pieces = [first, *middle]
    assert [token_id for piece in pieces for token_id in piece.token_ids] == wanted(4)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.index for piece in pieces] == sorted({piece.index for piece in pieces})
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert pieces[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert not any(piece.finish_reason or piece.done for piece in pieces[:-1])
    assert (first.seed, last.seed) == (2**64 - 1, 2**64 - 1)
    assert not any(piece.seed for piece in middle)
    assert len({piece.request_id for piece in [*pieces, last]}) == 1
    assert len(first.request_id) == 32
    assert last.done
    assert not last.token_ids
    usage = inference_pb2.Usage(prompt_tokens=6, completion_tokens=4, cached_tokens=4)
    assert last.usage == usage
    assert 0 < last.timing.ttft_ms <= last.timing.total_ms
    assert (last.prefill_worker, last.decode_worker) == ("p0", "d0")


async def test_three_forms_of_a_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path) as (system, stub, _):
        few = types_pb2.SamplingParams(max_tokens=1)
        messages = [inference_pb2.ChatMessage(role="user", content="the")]
        chat = inference_pb2.ChatPrompt(messages=messages)
        bare = inference_pb2.ChatPrompt(messages=messages, add_generation_prompt=False)
        for request in (
            Request(text="the", sampling=few),
            Request(chat=chat, sampling=few),
            Request(chat=bare, sampling=few),
        ):
            await generate(stub, request)
        tokenizer = system.pipeline.model.tokenizer
        seen = [list(request.prompt_token_ids) for request in system.prefills[0].requests]
        assert seen == [
            tokenizer.encode("the"),
            tokenizer.encode("<bos><user>the\n<assistant>", add_special_tokens=False),
            tokenizer.encode("<bos><user>the\n", add_special_tokens=False),
        ]
        tokenized = [
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="the")),
            await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat)),
            await stub.Tokenize(inference_pb2.TokenizeRequest(chat=bare)),
        ]
        assert [list(response.token_ids) for response in tokenized] == seen
        assert tokenized[0].max_model_len == 128


async def test_everything_reaches_the_workers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (system, stub, _):
        request = tokens(cache_salt="salt", priority=-3)
        request.sampling.MergeFrom(
            types_pb2.SamplingParams(
                n=2,
                max_tokens=3,
                min_tokens=2,
                temperature=0.5,
                top_p=0.5,
                top_k=5,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=1.0,
                frequency_penalty=-1.0,
                seed=9,
                logit_bias={5: 2.0},
                stop_token_ids=[7, 8],
                ignore_eos=True,
                logprobs=3,
            )
        )
        await generate(stub, request)
        for seen in (*system.prefills[0].requests, *system.decodes[0].requests):
            assert seen.sampling == request.sampling
            assert (seen.cache_salt, seen.priority, seen.model) == ("salt", -3, "tiny")
            assert list(seen.prompt_token_ids) == list(PROMPT)
            assert seen.num_prompt_tokens == len(PROMPT)


async def test_detokenize_and_list_models(tmp_path: Path) -> None:
    async with serving(tmp_path) as (system, stub, _):
        ids = system.pipeline.model.tokenizer.encode("the 한 world")
        plain = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
        special = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
        assert (plain.text, special.text) == ("the 한 world", "<bos>the 한 world")
        cut = await stub.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=system.pipeline.model.tokenizer.encode("x한")[:-1])
        )
        assert cut.text == "x\ufffd"
        long = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids * 1000))
        assert long.text == "the 한 world" * 1000
        (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 128, 300)
        assert model.has_chat_template
        assert model.ready
        system.placer.lost.add("d0")
        assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].ready


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (Request(), "INVALID_ARGUMENT", "prompt: is missing"),
        (Request(text=""), "INVALID_ARGUMENT", "text = '': must not be empty"),
        (Request(text="x" * 5_000_000), "INVALID_ARGUMENT", "text: has 5000000 bytes, must be at most 4194304"),
        (Request(tokens=inference_pb2.TokenPrompt()), "INVALID_ARGUMENT", "tokens.token_ids: must have at least one"),
        (tokens(300), "INVALID_ARGUMENT", "tokens.token_ids[0] = 300: must be below the vocabulary size of 300"),
        (tokens(*[5] * 128), "INVALID_ARGUMENT", "the prompt has 128 tokens, at most 127 fit"),
        (tokens(*[5] * 2_000_000), "INVALID_ARGUMENT", "the prompt has 2000000 tokens, at most 127 fit"),
        (tokens(5, model="gpt"), "NOT_FOUND", "model 'gpt' is not served here; known models: 'tiny'"),
        (tokens(5, adapter="a"), "NOT_FOUND", "adapter 'a' is not known"),
        (
            tokens(5, sampling=types_pb2.SamplingParams(temperature=float("nan"))),
            "INVALID_ARGUMENT",
            "sampling.temperature = nan",
        ),
        (
            tokens(5, sampling=types_pb2.SamplingParams(max_tokens=128)),
            "INVALID_ARGUMENT",
            "sampling.max_tokens = 128: must be at most 127: the prompt has 1 tokens, the context length is 128",
        ),
        (
            tokens(5, sampling=types_pb2.SamplingParams(min_tokens=127, n=64)),
            "INVALID_ARGUMENT",
            "sampling.min_tokens = 127: must be at most",
        ),
        (
            Request(
                chat=inference_pb2.ChatPrompt(
                    messages=[inference_pb2.ChatMessage(role="user")], template_kwargs_json="1"
                )
            ),
            "INVALID_ARGUMENT",
            "chat.template_kwargs_json = '1': must be a JSON object",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
async def test_bad_input_and_the_server_serves_on(tmp_path: Path, request_: Request, code: str, message: str) -> None:
    async with serving(tmp_path) as (_, stub, _channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, request_)
        error = from_rpc_error(caught.value)
        assert error.code.name == code
        assert message in error.message
        assert error.details, "rich details"
        responses = await generate(stub, tokens())
        assert [token_id for response in responses for token_id in response.token_ids] == wanted(4)


async def test_invalid_utf8_is_refused_before_it_reaches_us(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, channel):
        call = channel.unary_stream("/pagewire.v1.InferenceService/Generate")
        # field 2 (text), length 2, two bytes that are no UTF-8
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in call(b"\x12\x02\xff\xfe")]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "valid UTF-8" in (caught.value.details() or "")
        assert (await generate(stub, tokens()))[-1].done


async def test_a_message_over_the_transport_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, Request(text="x" * (17 << 20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await generate(stub, tokens()))[-1].done


async def test_cancel_and_deadline_of_the_client_reach_the_workers(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(script=Script(hang=True)), ScriptedDecode()
    async with serving(tmp_path, prefills=[prefill], decodes=[decode]) as (_, stub, _channel):
        call = stub.Generate(tokens())
        await eventually(lambda: decode.num_running == 1)
        call.cancel()
        await eventually(lambda: prefill.num_running == decode.num_running == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in stub.Generate(tokens(), timeout=0.3)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: prefill.num_running == decode.num_running == 0)
    assert prefill.num_cancelled == decode.num_cancelled == 2


async def test_no_worker_is_unavailable_with_a_retry_time(tmp_path: Path) -> None:
    async with serving(tmp_path, decodes=[]) as (_, stub, _channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, tokens())
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert [type(detail).__name__ for detail in error.details] == ["RetryInfo"]


async def test_two_clients_may_use_the_same_request_id(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _channel):
        results = await asyncio.gather(*(generate(stub, tokens(request_id="same")) for _ in range(4)))
    assert len({responses[0].request_id for responses in results}) == 4


def test_the_router_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, router.main; print(sorted({'torch', 'transformers', 'engine', 'kernels'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
