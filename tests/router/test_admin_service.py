"""AdminService of the router over a real fleet of scripted workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire import rpc
from pagewire.cli.explain_route import _print
from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from router.admin_service import RouterAdminServicer
from router.fleet import Fleet
from router.fleet_placer import FleetPlacer
from router.model import ModelFacts
from router.pipeline import Pipeline
from router.placement import Demand
from tests.router.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker
from tests.router.system import QUICK, a_call, collect, eventually, wanted
from tests.tiny_tokenizers import byte_level, write_model_directory


@asynccontextmanager
async def a_router(directory: Path, workers: list[ScriptedWorker]) -> AsyncIterator[tuple[Pipeline, Any, list[str]]]:
    """(pipeline, admin stub, what on_drain was told) over the real fleet and placer."""
    for worker in workers:
        await worker.start()
    model = ModelFacts.load(write_model_directory(directory / "tiny", byte_level(), vocab_size=300))
    fleet = Fleet([worker.endpoint for worker in workers], silence_seconds=1.0)
    placer = FleetPlacer(fleet, None, model="tiny")
    pipeline = Pipeline(model, placer, retry_limits=QUICK)
    drains: list[str] = []
    server = rpc.build_server()
    servicer = RouterAdminServicer(pipeline, fleet, None, on_drain=lambda: drains.append("router"))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    await fleet.start()
    pipeline.start()
    try:
        await fleet.wait_ready(["prefill", "decode"], timeout=60)
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield pipeline, admin_pb2_grpc.AdminServiceStub(channel), drains
    finally:
        await server.stop(None)
        await pipeline.close()
        await fleet.stop()
        for worker in workers:
            await worker.kill()


async def test_status_has_every_worker_in_its_own_words(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with a_router(tmp_path, [prefill, decode]) as (_, admin, _drains):
        status = await admin.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.process, status.index_state, status.num_requests) == ("router", "off", 0)
        assert status.version
        assert [worker.info.worker_id for worker in status.workers] == ["d0", "p0"]
        assert all(worker.alive and worker.num_cached_blocks == 7 for worker in status.workers)
        assert status.workers[0].info.incarnation == decode.incarnation
        await prefill.kill()

        async def only_decode_is_alive() -> bool:
            answer = await admin.GetStatus(admin_pb2.GetStatusRequest())
            return [worker.alive for worker in answer.workers] == [True, False]

        await eventually(only_decode_is_alive)


async def test_reset_reaches_one_or_all(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with a_router(tmp_path, [prefill, decode]) as (_, admin, _drains):
        assert (await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())).num_blocks == 10
        assert (await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(worker_id="d0"))).num_blocks == 5
        assert (prefill.num_resets, decode.num_resets) == (1, 2)
        with pytest.raises(grpc.aio.AioRpcError, match="worker 'x' is not alive; live workers: d0, p0") as caught:
            await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(worker_id="x"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_cached_blocks_are_the_union(tmp_path: Path) -> None:
    async with a_router(tmp_path, [ScriptedPrefill(), ScriptedDecode()]) as (_, admin, _drains):
        blocks = await admin.ListCachedBlocks(admin_pb2.ListCachedBlocksRequest())
    assert list(blocks.keys) == sorted([b"k" * 16, b"p0".ljust(16), b"d0".ljust(16)])


async def test_explain_route_scores_every_worker_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with a_router(tmp_path, [prefill, decode]) as (pipeline, admin, _drains):
        generate = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=range(10)), cache_salt="s")
        request = admin_pb2.ExplainRouteRequest(request=generate, session_id="me")
        answers = [await admin.ExplainRoute(request) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        answer = answers[0]
        assert (answer.num_prompt_tokens, answer.policy, answer.reason) == (10, "prefix", "disaggregated")
        assert (answer.prefill_worker, answer.decode_worker) == ("p0", "d0")
        assert [(each.worker_id, each.obstacle) for each in answer.workers] == [("p0", ""), ("d0", "")]
        assert dict(answer.workers[0].parts) == {"uncached": 10, "queued": 0}
        assert answer.workers[0].cost == 10
        assert (prefill.tickets, decode.num_running, pipeline.num_active) == ({}, 0, 0)
        request.request.tokens.token_ids.append(10**6)
        with pytest.raises(grpc.aio.AioRpcError, match=r"tokens.token_ids\[10\] = 1000000: must be below") as caught:
            await admin.ExplainRoute(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        del request.request.tokens.token_ids[-1]
        await prefill.kill()
        await decode.kill()

        async def nobody_is_left() -> bool:
            return bool((await admin.ExplainRoute(request)).decode_worker == "")

        await eventually(nobody_is_left)
        answer = await admin.ExplainRoute(request)
        assert answer.reason == "no decode worker can take the request: d0 unreachable"
        _print(answer)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"10 tokens, policy prefix: prefill on nobody, decode on nobody ({answer.reason})"
        assert lines[2].split() == ["p0", "prefill", "0", "0", "unreachable"]


async def test_explain_route_knows_the_breakers(tmp_path: Path) -> None:
    prefill, first, second = ScriptedPrefill(), ScriptedDecode(), ScriptedDecode("d1")
    async with a_router(tmp_path, [prefill, first, second]) as (pipeline, admin, _drains):
        services = pipeline._services
        generate = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=range(10)))

        async def explained() -> tuple[str, str, dict[str, str]]:
            answer = await admin.ExplainRoute(admin_pb2.ExplainRouteRequest(request=generate))
            return answer.prefill_worker, answer.decode_worker, {w.worker_id: w.obstacle for w in answer.workers}

        async def all_are_known() -> bool:
            return len((await explained())[2]) == 3

        def open_breaker(worker: ScriptedWorker) -> None:
            for _ in range(services.breakers.policy.num_failures):
                services.breakers.failed((worker.worker_id, worker.incarnation), services.clock() + 1e6, "test")

        await eventually(all_are_known)
        for worker, prefills, decodes, obstacles in (
            (first, "p0", "d1", {"p0": "", "d0": "breaker open", "d1": ""}),
            (prefill, "", "d1", {"p0": "breaker open", "d0": "breaker open", "d1": ""}),
        ):
            open_breaker(worker)
            assert await explained() == (prefills, decodes, obstacles)
            placement = services.place(Demand(tuple(range(10)), "", 8, 1))
            assert (placement.prefill is not None, placement.decode.worker_id) == (bool(prefills), decodes)
        open_breaker(second)
        prefills, decodes, obstacles = await explained()
        assert (prefills, decodes in ("d0", "d1")) == ("p0", True)
        assert set(obstacles.values()) == {""}, "without anybody else they are asked all the same"


async def test_drain_of_a_worker_and_of_the_router(tmp_path: Path) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    decode.peers = [prefill]
    async with a_router(tmp_path, [prefill, decode]) as (pipeline, admin, drains):
        result = collect([output async for output in pipeline.generate(a_call())])
        assert (result.token_ids, result.summary.prefill_worker) == ({0: wanted(8)}, "p0")
        await admin.Drain(admin_pb2.DrainRequest(worker_id="p0"))
        assert prefill.draining
        assert drains == []

        async def decode_prefills() -> bool:
            result = collect([output async for output in pipeline.generate(a_call())])
            return result.summary.prefill_worker == "d0"

        await eventually(decode_prefills)
        await admin.Drain(admin_pb2.DrainRequest())
        assert drains == ["router"]
        assert pipeline.draining
        await eventually(lambda: pipeline.num_active == 0)
