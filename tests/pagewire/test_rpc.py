"""Servers and channels on real sockets: health, reflection, limits, error mapping, tokens, TLS, port in use, drain."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from pagewire import reflection, rpc
from pagewire.errors import InvalidArgument, ResourceExhausted, from_rpc_error
from pagewire.interceptor import ServiceInterceptor
from pagewire.security import Security
from pagewire.v1 import inference_pb2, inference_pb2_grpc

BIN = Path(__file__).resolve().parents[2] / ".venv" / "bin"
SERVICE = "pagewire.v1.InferenceService"


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Misbehaves on demand: the prompt's text says how."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.entered = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.entered.set()
        try:
            yield inference_pb2.GenerateResponse(text="first")
            if request.text == "bug":
                raise ZeroDivisionError("secret detail")
            if request.text == "full":
                raise ResourceExhausted("queue is full (3 of 3)", retry_after_s=2.5)
            if request.text == "hang":
                await asyncio.Event().wait()
            if request.text == "soon":
                await asyncio.sleep(0.05)
            yield inference_pb2.GenerateResponse(text="second", done=True)
        finally:
            self.closed.set()

    async def Tokenize(self, request: Any, context: Any) -> Any:
        if request.text == "bad":
            raise InvalidArgument("text", "bad", "must be good")
        if request.text == "abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
        if request.text == "bug":
            raise ZeroDivisionError("secret detail")
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])


class Running:
    """A started server with what a test wants to look at."""

    def __init__(self, security: Security = rpc.PLAINTEXT) -> None:
        self.observed: list[tuple[str, str]] = []
        self._observed = asyncio.Event()
        self.servicer = Servicer()
        self.server = rpc.build_server(security=security, observe=self._observe)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.servicer, self.server)
        self.health = rpc.add_health_and_reflection(self.server, [SERVICE])
        self.port = rpc.bind(self.server, "127.0.0.1", 0, security)
        self.target = f"127.0.0.1:{self.port}"

    def _observe(self, method: str, code: str, seconds: float) -> None:
        assert seconds >= 0
        self.observed.append((method.rsplit("/")[-1], code))
        self._observed.set()

    async def wait_observed(self, count: int) -> list[tuple[str, str]]:
        """A client can see an RPC's end a moment before the interceptor has counted it."""
        while len(self.observed) < count:
            self._observed.clear()
            await asyncio.wait_for(self._observed.wait(), 5)
        return self.observed


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    running = Running()
    await running.server.start()
    yield running
    await running.server.stop(None)


async def tool(name: str, *args: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        str(BIN / name), *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_grpcurl_lists_describes_and_calls_through_reflection(running: Running) -> None:
    code, listed = await tool("grpcurl", "-plaintext", running.target, "list")
    assert code == 0, listed
    assert set(listed.split()) == {SERVICE, "grpc.health.v1.Health", *reflection.SERVICE_NAMES}
    code, described = await tool(
        "grpcurl", "-plaintext", running.target, "describe", "grpc.reflection.v1.ServerReflection"
    )
    assert code == 0
    assert "stream .grpc.reflection.v1.ServerReflectionRequest" in described
    code, described = await tool("grpcurl", "-plaintext", running.target, "describe", "pagewire.v1.GenerateRequest")
    assert code == 0
    assert "SamplingParams sampling" in described
    code, answer = await tool("grpcurl", "-plaintext", "-d", '{"text": "abc"}', running.target, f"{SERVICE}/Tokenize")
    assert code == 0, answer
    assert re.search(r'"token_?[iI]ds": \[\s*3\s*\]', answer), answer


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_under_both_names(running: Running, version: str) -> None:
    """grpcurl and buf try one after the other, so that they do not tell which of them is there."""
    async with rpc.channel(running.target) as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            reflection_pb2.ServerReflectionRequest(file_by_filename="nowhere.proto"),
        ]
        listed, described, unknown = [answer async for answer in ask(iter(requests), timeout=20)]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", *reflection.SERVICE_NAMES}
    assert described.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_buf_curl_calls_through_reflection(running: Running) -> None:
    url = f"http://{running.target}/{SERVICE}"
    curl = ("curl", "--protocol", "grpc", "--http2-prior-knowledge")
    code, answer = await tool("buf", *curl, "-d", '{"text": "abc"}', f"{url}/Tokenize")
    assert (code, json.loads(answer)) == (0, {"tokenIds": [3]})
    code, answer = await tool("buf", *curl, "-d", '{"text": "bad"}', f"{url}/Tokenize")
    assert code != 0
    error = json.loads(answer)
    assert (error["code"], error["message"]) == ("invalid_argument", "text = 'bad': must be good")
    assert error["details"][0]["type"] == "google.rpc.BadRequest"


async def test_health_check_of_process_service_and_unknown(running: Running) -> None:
    async with rpc.channel(running.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        running.health.set(SERVICE, serving=False)
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: entry.status for name, entry in listed.statuses.items()} == {"": 1, SERVICE: 2}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_watch_follows_changes_and_ends_on_close(running: Running) -> None:
    statuses = []
    async with rpc.channel(running.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        async for response in watch:
            statuses.append(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
            if len(statuses) == 1:
                running.health.set(SERVICE, serving=False)
            elif len(statuses) == 2:
                running.health.set(SERVICE, serving=True)
            elif len(statuses) == 3:
                running.health.close()
        running.health.set(SERVICE, serving=True)
        late = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert late.status == health_pb2.HealthCheckResponse.NOT_SERVING, "a drain is for good"
    assert statuses == ["SERVING", "NOT_SERVING", "SERVING", "NOT_SERVING"]


async def test_pagewire_error_travels_with_details(running: Running) -> None:
    async with rpc.channel(running.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="bad"))
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.message == "text = 'bad': must be good"
        (bad_request,) = error.details
        assert isinstance(bad_request, error_details_pb2.BadRequest)
        assert bad_request.field_violations[0].field == "text"

        call = stub.Generate(inference_pb2.GenerateRequest(text="full"))
        assert (await call.read()).text == "first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry, quota = error.details
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToMilliseconds() == 2500
        assert isinstance(quota, error_details_pb2.QuotaFailure)
    assert await running.wait_observed(2) == [
        ("Tokenize", "INVALID_ARGUMENT"),
        ("Generate", "RESOURCE_EXHAUSTED"),
    ]


async def test_bug_is_internal_with_an_id_in_the_log_and_the_server_survives(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with rpc.channel(running.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="bug"))
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.INTERNAL
        assert "secret" not in error.message
        (info,) = error.details
        assert isinstance(info, error_details_pb2.ErrorInfo)
        assert info.metadata["error_id"] in caplog.text
        assert "secret detail" in caplog.text

        call = stub.Generate(inference_pb2.GenerateRequest(text="bug"))
        assert (await call.read()).text == "first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert (await stub.Tokenize(inference_pb2.TokenizeRequest(text="abc"))).token_ids == [3]


@pytest.mark.parametrize("behaviour", ["error", "write"])
async def test_a_caller_that_is_gone_before_its_error_is_no_bug(
    behaviour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC fails the batch before it cancels the handler; nothing of that belongs into the log."""

    class Gone:
        async def abort(self, *_: Any) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

        async def write(self, _: Any) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

        def code(self) -> None:
            return None

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield "first"

    async def refuse(request: Any, context: Any) -> Any:
        raise InvalidArgument("text", "bad", "must be good")

    observed: list[str] = []
    interceptor = ServiceInterceptor(rpc.PLAINTEXT, lambda method, code, seconds: observed.append(code))
    handler = (
        grpc.unary_unary_rpc_method_handler(refuse, bytes)
        if behaviour == "error"
        else grpc.unary_stream_rpc_method_handler(answer, bytes)
    )
    wrapped = interceptor._wrap(handler, "/a.Service/Method")
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        await (wrapped.unary_unary or wrapped.unary_stream)(b"", Gone())
    assert not caplog.records
    assert observed == ["INVALID_ARGUMENT" if behaviour == "error" else "CANCELLED"]


async def test_abort_by_hand_keeps_its_code(running: Running) -> None:
    async with rpc.channel(running.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="abort"))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "by hand")
    assert await running.wait_observed(1) == [("Tokenize", "DATA_LOSS")]


async def test_invalid_utf8_is_the_callers_fault(running: Running) -> None:
    bad = inference_pb2.TokenizeRequest(text="XXXX").SerializeToString().replace(b"XXXX", b"ab\xff\xfe")
    async with rpc.channel(running.target) as channel:
        for call in (
            channel.unary_unary(f"/{SERVICE}/Tokenize")(bad),
            channel.unary_stream(f"/{SERVICE}/Generate")(bad).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = from_rpc_error(caught.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "valid UTF-8" in error.message


async def test_cancelled_stream_closes_the_handlers_generator_at_once(running: Running) -> None:
    async with rpc.channel(running.target) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="hang"))
        await call.read()
        assert not running.servicer.closed.is_set()
        call.cancel()
        await asyncio.wait_for(running.servicer.closed.wait(), 5)
    assert await running.wait_observed(1) == [("Generate", "CANCELLED")]


async def test_message_over_the_limit_is_refused_with_both_numbers(running: Running) -> None:
    async with rpc.channel(running.target, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * (rpc.MAX_MESSAGE_BYTES + 1)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(rpc.MAX_MESSAGE_BYTES) in str(caught.value.details())
        # More than gRPC's default of 4 MiB is fine.
        response = await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * (5 << 20)))
        assert response.token_ids == [5 << 20]


async def test_port_in_use_by_another_pagewire_server(running: Running) -> None:
    with pytest.raises(
        rpc.BindError, match=f"cannot listen on 127.0.0.1:{running.port}: port {running.port} is in use"
    ):
        rpc.bind(rpc.build_server(), "127.0.0.1", running.port)


async def test_port_in_use_by_a_plain_socket_and_unknown_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(rpc.BindError, match="is in use"):
            rpc.bind(rpc.build_server(), "127.0.0.1", port)
    with pytest.raises(rpc.BindError, match=r"cannot listen on no-such-host\.invalid:1234"):
        rpc.bind(rpc.build_server(), "no-such-host.invalid", 1234)


async def test_bearer_token_is_demanded_of_calls_but_not_of_probes(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha\nbeta\n")
    running = Running(Security.load(auth_token_file=tokens))
    await running.server.start()
    request = inference_pb2.TokenizeRequest(text="abc")
    for security, accepted in [
        (Security(tokens=("alpha",)), True),
        (Security(tokens=("beta",)), True),
        (Security(tokens=("gamma",)), False),
        (Security(), False),
    ]:
        async with rpc.channel(running.target, security=security) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            if accepted:
                assert (await stub.Tokenize(request)).token_ids == [3]
                generated = [m.text async for m in stub.Generate(inference_pb2.GenerateRequest(text="x"))]
                assert generated == ["first", "second"]
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Tokenize(request)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await running.server.stop(None)


async def serve_until(running: Running, drain: Any, drain_timeout: float, first: Any) -> float:
    """Runs `rpc.serve`, sends SIGTERM once `first()` is done, and returns the seconds from there to its return."""
    ready = asyncio.Event()
    serving = asyncio.ensure_future(
        rpc.serve(running.server, running.health, ready=ready.set, drain=drain, drain_timeout=drain_timeout)
    )
    await ready.wait()
    await first()
    started = asyncio.get_running_loop().time()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 20)
    return asyncio.get_running_loop().time() - started


async def test_death_ends_serving_at_once_and_is_raised() -> None:
    running = Running()
    ready, death = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def drain() -> None:
        await asyncio.sleep(60)

    serving = asyncio.ensure_future(
        rpc.serve(running.server, running.health, ready=ready.set, drain=drain, drain_timeout=60, death=death)
    )
    await ready.wait()
    async with rpc.channel(running.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        ends = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="soon"))
        assert (await ends.read()).text == "first"
        death.set_exception(RuntimeError("device on fire"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await ends.read()).text == "second"
        with pytest.raises(RuntimeError, match="device on fire"):
            await asyncio.wait_for(serving, 5)


async def test_sigterm_lets_running_calls_finish() -> None:
    running = Running()
    drained: list[bool] = []
    release = asyncio.Event()
    async with rpc.channel(running.target) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="ok"))
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        async def first() -> None:
            assert (await call.read()).text == "first"
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            release.set()

        async def drain() -> None:
            drained.append(True)

        seconds = await serve_until(running, drain, 10, first)
        assert (await call.read()).text == "second"
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() == grpc.aio.EOF
    assert drained == [True]
    # An open Watch does not hold the process for its whole drain timeout.
    assert seconds < 5


async def test_drain_timeout_cancels_what_hangs() -> None:
    running = Running()
    async with rpc.channel(running.target) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="hang"))

        async def first() -> None:
            await call.read()

        seconds = await serve_until(running, None, 0.5, first)
    assert 0.4 < seconds < 5
    assert running.servicer.closed.is_set()


async def test_second_signal_cancels_at_once() -> None:
    running = Running()
    async with rpc.channel(running.target) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="hang"))

        async def first() -> None:
            await call.read()
            asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGINT)

        seconds = await serve_until(running, None, 60, first)
    assert 0.4 < seconds < 5
    assert running.servicer.closed.is_set()


async def test_drain_that_fails_is_raised_after_the_server_has_stopped() -> None:
    running = Running()

    async def first() -> None:
        """Nothing runs."""

    async def drain() -> None:
        raise ZeroDivisionError("drain")

    with pytest.raises(ZeroDivisionError, match="drain"):
        await serve_until(running, drain, 10, first)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", running.port)


async def test_early_pings_in_a_silent_stream_do_not_end_the_connection(running: Running) -> None:
    """G16, scaled down: pings every 200 ms during silence, far below the 10 s the server asks for."""
    options = [("grpc.keepalive_time_ms", 200), ("grpc.http2.min_time_between_pings_ms", 200)]
    async with rpc.channel(running.target, options=options) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="hang"))
        await call.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 2.5)
    assert await running.wait_observed(1) == [("Generate", "CANCELLED")]
