"""An operator loads adapters through a router: all workers have the same one afterwards, or nothing has changed."""

import asyncio
import threading

import grpc
import pytest

from engine.lora.store import AdapterStore
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.decode_svc.harness import until
from tests.tiny_adapters import make_adapter
from tests.transfer_svc.fleet import fleet
from tests.transfer_svc.test_prefix_admin import operator

WAIT = 60.0


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def options(model, tmp_path):
    """Two workers, each with its own directory: `same` is the same adapter in both, `other` is not."""
    for i, name in enumerate(("p0", "d0")):
        make_adapter(model, tmp_path / name / "same", targets=("q_proj",))
        make_adapter(model, tmp_path / name / "other", targets=("q_proj",), seed=i)
    return {name: {"enable_lora": True, "lora_root": tmp_path / name} for name in ("p0", "d0")}


async def load(admin, path, generation=0, name="style"):
    answer = await admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name=name, path=path, generation=generation))
    return answer.adapter.ref.generation


async def listed(stub):
    return {(each.worker_id, each.adapter.ref.name, each.adapter.ref.generation) for each in
            (await stub.ListAdapters(admin_pb2.ListAdaptersRequest())).adapters}  # fmt: skip


async def test_all_workers_have_the_same_or_nothing_has_changed(model, options):
    async with fleet(model, ("p0", "d0"), options=options) as workers, operator(workers, model) as admin:
        for path, generation, message in (("other", 0, "is not the same adapter for all workers"), ("same", 5, "")):
            if not message:
                assert await load(admin, path, generation) == generation
                continue
            with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
                await load(admin, path, generation)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert await listed(admin) == set()
        now = {("p0", "style", 5), ("d0", "style", 5)}
        for path in ("same", "other"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await load(admin, path, 4)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert await listed(admin) == now
        await admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="style"))
        for worker in ("p0", "d0"):
            (view,) = workers[worker].worker.load().adapters
            assert (view.label.generation, view.retired) == (5, True)
            own = admin_pb2_grpc.AdminServiceStub(workers[worker].channel)
            assert await listed(own) == set()
        assert await listed(admin) == set()


async def test_a_slow_load_holds_up_no_transfer_and_is_told_also_when_nobody_waits(model, options, monkeypatch):
    may_go_on, arrived, real = threading.Event(), threading.Event(), AdapterStore.load

    def slow(store, *arguments, **more):
        arrived.set()
        assert may_go_on.wait(WAIT)
        return real(store, *arguments, **more)

    async with fleet(model, ("p0",), options=options) as workers:
        host, worker = workers["p0"].worker._host, workers["p0"].worker
        own = admin_pb2_grpc.AdminServiceStub(workers["p0"].channel)
        with monkeypatch.context() as patch:
            patch.setattr(AdapterStore, "load", slow)
            loads = [asyncio.ensure_future(load(own, "same", 1, "a0"))]
            try:
                await until(arrived.is_set)
                loads += [asyncio.ensure_future(load(own, "same", i + 1, f"a{i}")) for i in range(1, 6)]
                assert await asyncio.wait_for(host.in_thread(lambda: 7), WAIT) == 7
                changed = asyncio.ensure_future(worker.wait_for_change())
                loads[0].cancel()
            finally:
                may_go_on.set()
            await asyncio.gather(*loads, return_exceptions=True)
            await asyncio.wait_for(changed, WAIT)
        await until(lambda: len(worker.load().adapters) == 6)
