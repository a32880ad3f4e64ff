"""The router's doors for others share its locks: bearer tokens, health by name, reflection."""

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire import rpc
from pagewire.foreign.smg import common_pb2, vllm_engine_pb2_grpc
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.foreign.triton import grpc_service_pb2, grpc_service_pb2_grpc
from pagewire.grants import AREAS_EVERYWHERE, AREAS_ON_ROUTER
from pagewire.security import Security
from pagewire.vllm_engine.model_card import ModelCard
from router.fleet import Fleet
from router.oip import service as inference_protocol
from router.request import GenerateCall
from router.vllm_engine.service import RouterVllmEngine
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import PROMPT, System, a_system, eventually, wanted


async def test_a_token_opens_every_door(tmp_path: Path) -> None:
    security = Security(tokens=("secret",))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system:
        server = rpc.build_server(security=security)
        facade = RouterVllmEngine(system.pipeline, Fleet(), ModelCard(tmp_path / "tiny", "tiny"))
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(facade, server)
        inference_protocol.add_to_server(system.pipeline, server)
        port = rpc.bind(server, "127.0.0.1", 0)
        await server.start()
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=pb.SamplingParams(max_tokens=4)
        )
        try:
            async with rpc.channel(f"127.0.0.1:{port}") as channel:
                for call in (
                    vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest()),
                    grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(
                        grpc_service_pb2.ServerLiveRequest()
                    ),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            async with rpc.channel(f"127.0.0.1:{port}", security=security) as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                (response,) = [response async for response in stub.Generate(request)]
                assert list(response.complete.output_ids) == wanted(4)
                assert response.complete.prompt_tokens == len(PROMPT)
        finally:
            await server.stop(None)
            await facade.close()


async def test_an_abort_reaches_the_workers(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.05))
    async with a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system:
        server = rpc.build_server()
        facade = RouterVllmEngine(system.pipeline, Fleet(), ModelCard(tmp_path / "tiny", "tiny"))
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(facade, server)
        port = rpc.bind(server, "127.0.0.1", 0)
        await server.start()
        try:
            async with rpc.channel(f"127.0.0.1:{port}") as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                request = pb.GenerateRequest(
                    request_id="twice",
                    tokenized=pb.TokenizedInput(input_ids=PROMPT),
                    sampling_params=pb.SamplingParams(max_tokens=100),
                    stream=True,
                )
                calls = [stub.Generate(request) for _ in range(2)]  # ids are the clients' own
                for call in calls:
                    await call.read()
                await stub.Abort(pb.AbortRequest(request_ids=["twice"]))
                for call in calls:
                    last = None
                    while isinstance(response := await call.read(), pb.GenerateResponse):
                        last = response
                    assert last is not None
                    assert last.complete.finish_reason == "abort"
                await eventually(lambda: decode.num_running == 0 and system.pipeline.num_active == 0)
        finally:
            await server.stop(None)
            await facade.close()


@asynccontextmanager
async def serving(
    system: System, directory: Path, fleet: Fleet | None = None, **options: Any
) -> AsyncIterator[tuple[vllm_engine_pb2_grpc.VllmEngineStub, str, RouterVllmEngine]]:
    """(stub, target, facade) of a router's VllmEngine."""
    server = rpc.build_server(**options)
    facade = RouterVllmEngine(system.pipeline, fleet or Fleet(), ModelCard(directory / "tiny", "tiny"))
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(facade, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield vllm_engine_pb2_grpc.VllmEngineStub(channel), f"127.0.0.1:{port}", facade
    finally:
        await server.stop(None)
        await facade.close()


def a_request(**sampling: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**{"max_tokens": 4, **sampling})
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=params)


async def code_of(stream: Any) -> str:
    try:
        await stream.read()
        return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        stream.cancel()


@pytest.mark.parametrize("on_router", [True, False])
async def test_a_clients_token_opens_what_is_the_clients_own(tmp_path: Path, on_router: bool) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root\nshop inference\nops admin\n")
    areas = AREAS_ON_ROUTER if on_router else AREAS_EVERYWHERE
    security = Security.load(auth_token_file=tokens)
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system, tmp_path, security=security, areas=areas) as (stub, *_),
    ):

        async def outcomes(token: str) -> list[str]:
            metadata = (("authorization", f"Bearer {token}"),)
            events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=metadata)
            try:
                await stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=metadata)
                flush = "OK"
            except grpc.aio.AioRpcError as error:
                flush = error.code().name
            return [await code_of(stub.Generate(a_request(), metadata=metadata)), flush, await code_of(events)]

        no = "PERMISSION_DENIED"
        assert await outcomes("shop") == (["OK", no, no] if on_router else [no] * 3)
        assert await outcomes("ops") == ([no, "OK", "OK"] if on_router else [no] * 3)
        assert await outcomes("root") == ["OK"] * 3


async def test_numbers_are_checked_before_anything_is_made_of_them(tmp_path: Path) -> None:
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system, tmp_path) as (stub, *_),
    ):
        for n in (65, 2**32 - 1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(a_request(n=n)).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == f"sampling.n = {n}: must be in 1 … 64"


async def test_labels_come_in_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[GenerateCall] = []
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system, tmp_path) as (stub, *_),
    ):
        generate = system.pipeline.generate

        def watched(call: GenerateCall, **options: Any) -> Any:
            calls.append(call)
            return generate(call, **options)

        monkeypatch.setattr(system.pipeline, "generate", watched)
        metadata = (("x-session-id", "s" * 200), ("x-tenant", "t"), ("x-cache-salt", "pepper"))
        assert await code_of(stub.Generate(a_request(), metadata=metadata)) == "OK"
        (call,) = calls
        assert (call.session_id, call.tenant, call.cache_salt) == ("s" * 128, "t", "pepper")
        assert system.placer.demands[0].session_id == "s" * 128
        assert system.placer.demands[0].cache_salt == "pepper"


async def test_an_abort_names_its_requests(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(delay=0.05))
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system,
        serving(system, tmp_path) as (stub, *_),
    ):
        request = a_request(max_tokens=20)
        request.stream = True
        nameless = stub.Generate(request)
        await nameless.read()
        with pytest.raises(grpc.aio.AioRpcError, match="request_ids"):
            await stub.Abort(pb.AbortRequest(request_ids=["x", ""]))
        while isinstance(response := await nameless.read(), pb.GenerateResponse):
            last = response
        assert last.complete.finish_reason == "length"


def _jwt(subject: str, number: int) -> str:
    """As an issuer would write it; who checks it is not the facade."""
    claims = base64.urlsafe_b64encode(json.dumps({"iss": "us", "sub": subject, "jti": number}).encode()).decode()
    return f"Bearer header.{claims.rstrip('=')}.signature"


@pytest.mark.parametrize(
    ("own", "others", "renewed"),
    [
        ((("x-tenant", "a"),), (("x-tenant", "b"),), (("x-tenant", "a"),)),
        ((("authorization", "Bearer one"),), (("authorization", "Bearer two"),), (("authorization", "Bearer one"),)),
        ((("authorization", _jwt("x", 1)),), (("authorization", _jwt("y", 2)),), (("authorization", _jwt("x", 3)),)),
    ],
    ids=["tenant", "token", "jwt"],
)
async def test_an_abort_ends_the_callers_own_requests_alone(
    tmp_path: Path, own: Any, others: Any, renewed: Any
) -> None:
    decode = ScriptedDecode(script=Script(delay=0.02))
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[decode]) as system,
        serving(system, tmp_path) as (stub, *_),
    ):
        request = a_request(max_tokens=100)
        request.stream, request.request_id = True, "same"
        streams = [stub.Generate(request, metadata=metadata) for metadata in (own, others)]
        for stream in streams:
            await stream.read()
        for metadata in ((), (("x-tenant", "c"),), renewed):
            await stub.Abort(pb.AbortRequest(request_ids=["same"]), metadata=metadata)
        reasons = []
        for stream in streams:
            while isinstance(response := await stream.read(), pb.GenerateResponse):
                last = response
            reasons.append(last.complete.finish_reason)
        assert reasons == ["abort", "length"]


async def test_text_is_tokenized_after_admission_and_no_further_than_it_fits(tmp_path: Path) -> None:
    async with (
        a_system(
            tmp_path,
            prefills=[ScriptedPrefill(script=Script(hang=True))],
            decodes=[ScriptedDecode()],
            max_concurrent_requests=1,
        ) as system,
        serving(system, tmp_path) as (stub, *_),
    ):
        request = pb.GenerateRequest(text="ab" * 100_000, sampling_params=pb.SamplingParams(max_tokens=4))
        with pytest.raises(grpc.aio.AioRpcError, match="the prompt has at least"):
            await stub.Generate(request).read()
        running = stub.Generate(a_request())
        await eventually(lambda: bool(system.prefills[0].requests))
        assert await code_of(stub.Generate(request)) == "RESOURCE_EXHAUSTED"
        running.cancel()
        await eventually(lambda: system.pipeline.num_active == 0)
        system.pipeline.start_drain()
        assert await code_of(stub.Generate(request)) == "UNAVAILABLE"


async def test_text_says_how_long_it_is(tmp_path: Path) -> None:
    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system, tmp_path) as (stub, *_),
    ):
        params = pb.SamplingParams(max_tokens=4, truncate_prompt_tokens=5)
        request = pb.GenerateRequest(text="abcdefghij", sampling_params=params, stream=True)
        responses = [response async for response in stub.Generate(request)]
        assert [each.chunk.prompt_tokens or each.complete.prompt_tokens for each in responses] == [5] * len(responses)
        assert len(responses) > 1


async def test_workers_are_followed_while_somebody_listens(tmp_path: Path) -> None:
    def num_followers() -> int:
        return sum(task.get_name() == "kv-relay" for task in asyncio.all_tasks())

    async with (
        a_system(tmp_path, prefills=[ScriptedPrefill()], decodes=[ScriptedDecode()]) as system,
        serving(system, tmp_path) as (stub, *_),
    ):
        streams = [stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()) for _ in range(2)]
        for stream in streams:
            await stream.read()
        assert num_followers() == 1
        streams[0].cancel()
        await streams[1].read()  # a heartbeat later
        assert num_followers() == 1
        streams[1].cancel()
        await eventually(lambda: num_followers() == 0, seconds=20)


def test_foreign_stubs_are_those_that_clients_load() -> None:
    """A process may have both: their files have the same names, so they must have the same content."""
    code = (
        "from tritonclient.grpc import service_pb2\n"
        "from pagewire.foreign.triton import grpc_service_pb2\n"
        "assert service_pb2.ModelInferRequest.DESCRIPTOR is grpc_service_pb2.ModelInferRequest.DESCRIPTOR\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
