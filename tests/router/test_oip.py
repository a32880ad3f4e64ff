"""ModelStreamInfer at the router's end: it goes on until its client, or the router, has had enough."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire import rpc
from pagewire.foreign.triton import grpc_service_pb2 as pb
from pagewire.foreign.triton import grpc_service_pb2_grpc
from router.oip import service as inference_protocol
from router.request import GenerateCall
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import System, a_system


def request(text: str, **parameters: int) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="tiny", id=text)
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    for name, value in parameters.items():
        made.parameters[name].int64_param = value
    return made


async def test_an_idle_stream_does_not_hold_up_a_drain(tmp_path: Path) -> None:
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system:
        server = rpc.build_server()
        servicer = inference_protocol.add_to_server(system.pipeline, server)
        port = rpc.bind(server, "127.0.0.1", 0)
        await server.start()
        try:
            async with rpc.channel(f"127.0.0.1:{port}") as channel:
                stream = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
                await stream.write(request("abc", max_tokens=3))
                await stream.write(request("abcd", max_tokens=0))
                answers = [await stream.read(), await stream.read()]
                messages = {answer.infer_response.id: answer.error_message for answer in answers}
                assert messages == {"abc": "", "abcd": "sampling.max_tokens = 0: must be at least 1"}
                reading = asyncio.ensure_future(stream.read())
                await asyncio.sleep(0.05)
                assert not reading.done()
                await system.pipeline.drain()
                await servicer.close()
                async with asyncio.timeout(60):
                    assert not isinstance(await reading, pb.ModelStreamInferResponse)
        finally:
            await server.stop(None)


@asynccontextmanager
async def serving(system: System) -> AsyncIterator[grpc_service_pb2_grpc.GRPCInferenceServiceStub]:
    server = rpc.build_server()
    inference_protocol.add_to_server(system.pipeline, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
    finally:
        await server.stop(None)


def add_input(made: pb.ModelInferRequest, name: str, value: str | bool) -> None:
    tensor = made.inputs.add(name=name, datatype="BOOL" if isinstance(value, bool) else "BYTES", shape=[1])
    if isinstance(value, bool):
        tensor.contents.bool_contents.append(value)
    else:
        tensor.contents.bytes_contents.append(value.encode())


BAD: dict[str, tuple[Any, str]] = {
    "many": ('{"n": 4294967295}', "sampling.n = 4294967295: must be in 1 … 64"),
    "infinite": ('{"max_tokens": Infinity}', "parameters.max_tokens = inf: must be a finite number"),
    "huge": ('{"top_k": 1e999}', "parameters.top_k = inf: must be a finite number"),
    "written": ('{"seed": "inf"}', "parameters.seed = 'inf': must be a finite number"),
    "none": ('{"stop_token_ids": [NaN]}', "parameters.stop_token_ids = nan: must be a finite number"),
    "salt": ('{"cache_salt": "a\\ud800"}', "parameters.cache_salt: must be Unicode text; it has a lone surrogate"),
    "stop": ('{"stop": ["\\udfff"]}', "parameters.stop: must be Unicode text; it has a lone surrogate"),
    "unknown": ('{"\\ud800": 1}', "parameters = '\\ud800': is none of "),
    "first": (2**31, "priority = 2147483648: must be in -2147483648 … 2147483647"),
    "last": (-(2**31) - 1, "priority = -2147483649: must be in -2147483648 … 2147483647"),
}


async def test_an_error_ends_its_own_request_alone(tmp_path: Path) -> None:
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system) as stub,
    ):
        stream = stub.ModelStreamInfer()
        for name, (value, _) in BAD.items():
            made = request("abc", **({"priority": value} if isinstance(value, int) else {}))
            made.id = name
            if isinstance(value, str):
                add_input(made, "sampling_parameters", value)
            await stream.write(made)
        await stream.write(request("good", max_tokens=2))
        told: dict[str, str] = {}
        async with asyncio.timeout(60):
            while len(told) <= len(BAD):
                answer = await stream.read()
                assert isinstance(answer, pb.ModelStreamInferResponse), await stream.code()
                told[answer.infer_response.id] = answer.error_message
        await stream.done_writing()
        for name, (_, message) in BAD.items():
            assert told[name].startswith(message), name
        assert told["good"] == ""


async def test_what_should_not_happen_ends_its_own_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system) as stub,
    ):
        generate = system.pipeline.generate

        def breaks(call: GenerateCall, **options: Any) -> Any:
            if call.client_request_id == "bad":
                raise ZeroDivisionError("a secret")
            return generate(call, **options)

        monkeypatch.setattr(system.pipeline, "generate", breaks)
        stream = stub.ModelStreamInfer()
        for text in ("bad", "good"):
            await stream.write(request(text, max_tokens=2))
        with caplog.at_level(logging.ERROR):
            answers = [await stream.read(), await stream.read()]
        told = {answer.infer_response.id: answer.error_message for answer in answers}
        assert told["good"] == ""
        assert told["bad"].startswith("internal error ")
        assert "secret" not in told["bad"]
        (record,) = [each for each in caplog.records if "error_id" in vars(each)]
        assert vars(record)["error_id"] in told["bad"]
        await stream.done_writing()


async def test_a_refusal_of_numbers_in_one_call(tmp_path: Path) -> None:
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system) as stub,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request("abc", n=2**32 - 1))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_streamed_counts_have_every_token(tmp_path: Path) -> None:
    """ "€" is three bytes and here three tokens, of which only the last one brings text."""
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system:
        euro = await system.pipeline.detokenize(
            ids := system.pipeline.model.tokenizer.encode("€"), skip_special_tokens=True
        )
        ids = [each for each in ids if each >= 3]
        assert (euro, len(ids)) == ("€", 3)
        for worker in (*system.prefills, *system.decodes):
            worker.script = Script(tokens=lambda prompt, choice, index: ids[index % 3], delay=0.02)
        async with serving(system) as stub:
            made = request("abc", max_tokens=8)
            for name in ("stream", "return_num_output_tokens"):
                add_input(made, name, True)
            stream = stub.ModelStreamInfer()
            await stream.write(made)
            await stream.done_writing()
            counts, texts = [], []
            async for answer in stream:
                assert not answer.error_message
                outputs = {output.name: output.contents for output in answer.infer_response.outputs}
                counts += outputs["num_output_tokens"].uint_contents
                texts += outputs["text_output"].bytes_contents
            assert sum(counts) == 8
            assert b"".join(texts).decode().startswith("€€")
            assert counts[0] == 3


async def test_a_session_is_named_in_the_metadata(tmp_path: Path) -> None:
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system) as stub,
    ):
        made = request("abc", max_tokens=2)
        add_input(made, "sampling_parameters", json.dumps({"cache_salt": "pepper"}))
        await stub.ModelInfer(made, metadata=(("x-session-id", "s"), ("x-tenant", "t")))
        (demand,) = system.placer.demands[:1]
        assert (demand.session_id, demand.cache_salt) == ("s", "pepper")
        assert system.prefills[0].requests[0].tenant == "t"
