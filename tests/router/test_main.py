"""The router as a process: ready line, health, reflection, metrics, drain on SIGTERM, clear refusals."""

import asyncio
import re
import signal
import subprocess
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis

from kvstore.embedded_valkey import EmbeddedValkey
from kvstore.redis_keys import MODELS
from kvstore.registry import ModelRecord
from kvstore.tokenizer_digest import tokenizer_digest
from pagewire import AsyncClient, rpc
from pagewire.errors import PagewireError
from pagewire.foreign.smg import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.ports import free_port
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import eventually, wanted
from tests.tiny_tokenizers import byte_level, write_model_directory


async def launch(model: Path, *flags: str) -> Process:
    command = (sys.executable, "-m", "pagewire", "router", "--model", str(model), *flags)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


@asynccontextmanager
async def a_router(model: Path, *flags: str) -> AsyncIterator[tuple[Process, str]]:
    """(process, target) of a router that is ready."""
    process = await launch(model, "--port", "0", *flags)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            line = (await process.stdout.readline()).decode()
        found = re.fullmatch(r"pagewire router ready (127\.0\.0\.1:\d+)\n", line)
        if found is None:
            process.kill()
            raise AssertionError(line + (await process.communicate())[1].decode())
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny", byte_level(), vocab_size=300)


async def test_serves_until_sigterm_and_finishes_what_runs(model: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(script=Script(delay=0.02))
    decode.peers = [prefill]
    await prefill.start()
    await decode.start()
    prompt = [10, 11, 12]
    flags = ("--prefill-workers", prefill.endpoint, "--decode-workers", decode.endpoint, "--metrics-port", "0")
    try:
        async with a_router(model, *flags) as (process, target), rpc.channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="pagewire.v1.InferenceService")

            async def serving() -> bool:
                return bool((await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING)

            await eventually(serving)
            async with AsyncClient(target) as client:
                running = asyncio.create_task(client.complete(prompt, max_tokens=40))
                await asyncio.sleep(0.2)
                process.send_signal(signal.SIGTERM)
                completion = await running
            assert list(completion.token_ids) == wanted(40, prompt=prompt)
            assert (completion.prefill_worker, completion.decode_worker) == ("p0", "d0")
            async with asyncio.timeout(60):
                assert await process.wait() == 0
    finally:
        await prefill.kill()
        await decode.kill()


async def test_drain_over_admin_is_not_serving_as_a_whole(model: Path) -> None:
    decode = ScriptedDecode()
    await decode.start()
    try:
        async with a_router(model, "--decode-workers", decode.endpoint) as (_, target), rpc.channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            async with AsyncClient(target) as client:
                await ready(client)
            process = health_pb2.HealthCheckRequest()
            assert (await health.Check(process)).status == health_pb2.HealthCheckResponse.SERVING
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
            assert (await health.Check(process)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await asyncio.sleep(0.3)  # loads come in, and change nothing
            for service in ("", "pagewire.v1.InferenceService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await decode.kill()


async def test_a_clients_token_does_not_open_what_tells_of_others(model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root\nshop inference\n")
    metadata = (("authorization", "Bearer shop"),)
    async with (
        a_router(model, "--auth-token-file", str(tokens), "--decode-workers", "127.0.0.1:1") as (_, target),
        rpc.channel(target) as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        health = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), metadata=metadata)
        assert (health.healthy, health.message) == (False, "no worker can serve now")
        for call in (
            stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=metadata),
            stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=metadata).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_another_tokenizer_than_the_workers_have(model: Path) -> None:
    decode, valkey = ScriptedDecode(), EmbeddedValkey.start()
    await decode.start()

    def announce(digest: str) -> None:
        with Redis.from_url(valkey.url) as redis:
            redis.hset(MODELS, "tiny", ModelRecord("tiny", b"r" * 32, digest).to_json())

    try:
        announce("ab" * 32)
        flags = ("--redis-url", valkey.url, "--decode-workers", decode.endpoint)
        async with a_router(model, *flags) as (process, target), AsyncClient(target) as client:

            async def outcome() -> str:
                try:
                    await client.complete([10, 11], max_tokens=3)
                except PagewireError as error:
                    return error.code.name
                return "OK"

            async def is_refused() -> bool:
                return await outcome() == "FAILED_PRECONDITION"

            await eventually(is_refused, seconds=20)
            assert not (await client.list_models())[0].ready
            announce(tokenizer_digest(model))

            async def is_served() -> bool:
                return await outcome() == "OK"

            await eventually(is_served, seconds=20)
            process.terminate()
            assert process.stderr is not None
            log = (await process.stderr.read()).decode()
        assert log.count("NOT_SERVING: the workers of model 'tiny' have another tokenizer.json") == 1
    finally:
        await decode.kill()
        valkey.stop()


async def test_the_metrics_port_serves_what_requests_have_counted(model: Path) -> None:
    decode = ScriptedDecode()
    await decode.start()
    port = free_port()
    try:
        async with a_router(model, "--decode-workers", decode.endpoint, "--metrics-port", str(port)) as (_, target):
            async with AsyncClient(target) as client:
                await ready(client)
                await client.complete([10, 11], max_tokens=5)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:  # noqa: ASYNC210
                text = page.read().decode()
    finally:
        await decode.kill()
    assert 'vllm:generation_tokens_total{model_name="tiny"} 5.0' in text
    assert 'vllm:prompt_tokens_total{model_name="tiny"} 2.0' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'pagewire:num_workers_alive{model_name="tiny"} 1.0' in text


async def ready(client: AsyncClient) -> None:
    """Waits until the router sees a decode worker."""

    async def is_ready() -> bool:
        return (await client.list_models())[0].ready

    await eventually(is_ready)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [("config.json", "has no config.json"), ("tokenizer.json", "tokenizer.json does not exist")],
)
async def test_a_broken_model_directory_ends_it_with_one_line(model: Path, breakage: str, message: str) -> None:
    (model / breakage).unlink()
    process = await launch(model, "--port", "0")
    _, stderr = await process.communicate()
    assert process.returncode not in (0, None)
    assert message in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_a_port_in_use_ends_it_with_one_line(model: Path) -> None:
    async with a_router(model) as (_, target):
        process = await launch(model, "--port", target.rpartition(":")[2])
        _, stderr = await process.communicate()
    assert process.returncode not in (0, None)
    assert "is in use" in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_redis_out_of_reach_costs_hits_and_not_requests(model: Path) -> None:
    decode = ScriptedDecode()
    await decode.start()
    flags = ("--decode-workers", decode.endpoint, "--redis-url", "redis://127.0.0.1:1")
    try:
        async with a_router(model, *flags) as (_, target), AsyncClient(target) as client:
            await ready(client)
            completion = await client.complete([10, 11], max_tokens=5)
    finally:
        await decode.kill()
    assert list(completion.token_ids) == wanted(5, prompt=[10, 11])


def test_what_a_router_does_not_import() -> None:
    """Each would stay in memory for nothing: 5 to 20 MB."""
    program = "import router.main, sys; print(sorted({'numpy', 'llguidance', 'torch', 'uvicorn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_imported_late_is_missed_at_the_start() -> None:
    program = "import sys; sys.modules['llguidance'] = None; import router.main"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'llguidance'\n")
