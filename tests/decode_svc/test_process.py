"""Workers as processes: the ready line, kill -9 in mid-pull, SIGTERM with work in flight, a port in use."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import admin_pb2, admin_pb2_grpc, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from pagewire.wire import sampling_to_proto
from tests.decode_svc.harness import greedy, random_prompt, reference

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pagewire.config import EngineOptions, WorkerConfig
from {role}_svc.main import run
engine = EngineOptions(model={model!r}, dtype="float32", kernels="reference", block_size=4, cpu_threads=1,
                       kv_cache_memory_bytes=1 << 20, max_num_batched_tokens={chunk}, max_num_seqs=4)
sys.exit(run(WorkerConfig(role={role!r}, engine=engine, drain_timeout=10, port={port})))
"""


@asynccontextmanager
async def process(role, model, chunk=64, port=0):
    program = PROGRAM.format(role=role, model=str(model), chunk=chunk, port=port)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def ready(child, role):
    line = (await asyncio.wait_for(child.stdout.readline(), 60)).decode()
    assert line.startswith(f"pagewire {role} ready 127.0.0.1:"), line
    return line.split()[-1]


def request(number, prompt, params):
    return types_pb2.WorkerRequest(
        request_id=f"x{number}",
        prompt_token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=sampling_to_proto(params),
    )


async def test_kill_in_mid_pull_then_drain(tiny_model):
    model = tiny_model("llama")
    prompt, params = random_prompt(300, 1), greedy(6)
    short = random_prompt(20, 2)
    expected, expected_short = reference(model, [(prompt, params), (short, greedy(60))], num_blocks=128)
    async with process("prefill", model, chunk=4) as prefill, process("decode", model) as decode:
        p_endpoint, d_endpoint = await asyncio.gather(ready(prefill, "prefill"), ready(decode, "decode"))
        async with grpc.aio.insecure_channel(p_endpoint) as p, grpc.aio.insecure_channel(d_endpoint) as d:
            status = await admin_pb2_grpc.AdminServiceStub(p).GetStatus(admin_pb2.GetStatusRequest())
            me = status.workers[0].info
            stub = prefill_pb2_grpc.PrefillServiceStub(p)
            message = request(1, prompt, params)
            call = stub.Prefill(prefill_pb2.PrefillRequest(request=message, hand_off=True))
            ticket = (await call.read()).accepted.ticket
            source = decode_pb2.TransferSource(endpoint=me.endpoint, incarnation=me.incarnation, ticket=ticket)
            decode_stub = decode_pb2_grpc.DecodeServiceStub(d)
            decoding = decode_stub.Decode(decode_pb2.DecodeRequest(request=message, source=source))
            assert (await decoding.read()).HasField("accepted")
            while (await call.read()).progress.num_computed_tokens < 40:
                pass
            prefill.kill()
            tokens = []
            while (response := await decoding.read()) is not grpc.aio.EOF:
                tokens.append(response.token.token_id)
            assert [tokens] == expected

            running = decode_stub.Decode(decode_pb2.DecodeRequest(request=request(2, short, greedy(60))))
            await running.read()
            decode.send_signal(signal.SIGTERM)
            health = health_pb2_grpc.HealthStub(d)
            async with asyncio.timeout(60):
                async for change in health.Watch(health_pb2.HealthCheckRequest()):
                    if change.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                        break
            tokens = []
            while (response := await running.read()) is not grpc.aio.EOF:
                tokens.append(response.token.token_id)
            assert [tokens] == expected_short, "what ran was finished"
            assert await asyncio.wait_for(decode.wait(), 20) == 0


async def test_a_port_in_use_is_said(tiny_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with process("prefill", tiny_model("llama"), port=port) as child:
            _, errors = await asyncio.wait_for(child.communicate(), 60)
            assert child.returncode != 0
            assert f"port {port} is in use" in errors.decode()


def test_no_shared_memory_file_survives():
    assert not [name for name in os.listdir("/dev/shm") if "pagewire" in name]


DYING = """
from engine.engine import Engine
def step(engine):
    raise RuntimeError("device on fire")
def fail_step(engine, message):
    raise RuntimeError("books are broken")
Engine.step, Engine.fail_step = step, fail_step
"""


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.nightly), "decode"])
async def test_a_dead_device_thread_ends_the_process(tiny_model, role, monkeypatch):
    """Else it would stay SERVING, take requests and never answer one."""
    monkeypatch.setattr(f"{__name__}.PROGRAM", DYING + PROGRAM)
    async with process(role, tiny_model("llama")) as child:
        endpoint = await ready(child, role)
        async with grpc.aio.insecure_channel(endpoint) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            asked = request(1, random_prompt(9, 1), greedy(3))
            if role == "prefill":
                call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(request=asked))
            else:
                call = decode_pb2_grpc.DecodeServiceStub(channel).Session()
                begun = decode_pb2.DecodeRequest(request=asked)
                await call.write(decode_pb2.SessionRequest(start=decode_pb2.SessionStart(handle=1, decode=begun)))
            changed = await asyncio.wait_for(watch.read(), 20)
            assert changed.status == health_pb2.HealthCheckResponse.NOT_SERVING
            _, stderr = await asyncio.wait_for(child.communicate(), 20)
            call.cancel()
        assert child.returncode == 1
        assert b"the device thread cannot go on" in stderr
        assert b"this worker cannot go on and exits: RuntimeError: books are broken" in stderr
