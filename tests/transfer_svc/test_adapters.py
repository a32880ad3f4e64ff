"""An operator loads adapters through a router: all workers have the same one afterwards, or nothing has changed."""

import asyncio
import threading

import grpc
import pytest

from engine.lora.errors import AdapterLimit
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


def failing(node, when):
    """The worker's own load goes wrong in the second phase, or only looks so: it is done all the same."""
    store = node.engine.adapters
    real = store.load

    def load(*arguments, check_only=False, **more):
        if check_only:
            return real(*arguments, check_only=True, **more)
        if when == "after":
            real(*arguments, **more)
        raise AdapterLimit("no place is left")

    store.load = load


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_half_made_load_is_taken_back(model, options, when):
    """What it was to replace is there again, with the same generation: its KV still counts."""
    async with fleet(model, ("p0", "d0"), options=options) as workers, operator(workers, model) as admin:
        assert await load(admin, "same", 5) == 5
        failing(workers["d0"], when)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await load(admin, "same", 7)
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert failed.value.details() == (
            "adapter 'style' was not loaded: worker d0 has failed (RESOURCE_EXHAUSTED: no place is left); "
            f"it was taken back from: {'p0' if when == 'before' else 'd0, p0'}"
        )
        for name in ("p0", "d0"):
            own = admin_pb2_grpc.AdminServiceStub(workers[name].channel)
            assert await listed(own) == {(name, "style", 5)}
        with pytest.raises(grpc.aio.AioRpcError, match="generation 7 of adapter 'style': was taken back"):
            await load(admin_pb2_grpc.AdminServiceStub(workers["p0"].channel), "same", 7)
        await until(
            lambda: all(node.worker.load().adapters[0].label.generation == 5 for node in workers.nodes.values())
        )


async def test_a_load_that_is_asked_for_again_and_fails_is_taken_back_from_nobody(model, options):
    async with fleet(model, ("p0", "d0"), options=options) as workers, operator(workers, model) as admin:
        assert await load(admin, "same", 5) == 5
        failing(workers["d0"], "before")
        with pytest.raises(grpc.aio.AioRpcError, match=r"worker d0 has failed .* taken back from: none"):
            await load(admin, "same", 5)
        assert await listed(admin) == {("p0", "style", 5), ("d0", "style", 5)}
        for name in ("p0", "d0"):
            own = admin_pb2_grpc.AdminServiceStub(workers[name].channel)
            assert await listed(own) == {(name, "style", 5)}


async def test_a_worker_that_dies_in_the_middle_leaves_the_others_without_it(model, options):
    async with fleet(model, ("p0", "d0"), options=options) as workers, operator(workers, model) as admin:
        arrived, may_go_on, store = threading.Event(), threading.Event(), workers["d0"].engine.adapters
        real = store.load

        def hanging(*arguments, check_only=False, **more):
            if not check_only:
                arrived.set()
                assert may_go_on.wait(WAIT)
            return real(*arguments, check_only=check_only, **more)

        store.load = hanging
        loading = asyncio.ensure_future(load(admin, "same", 7))
        await until(arrived.is_set)
        p0 = workers["p0"].worker
        await until(lambda: [each.label.generation for each in p0.load().adapters] == [7])
        stopping = asyncio.ensure_future(workers["d0"].app.server.server.stop(None))
        with pytest.raises(grpc.aio.AioRpcError, match=r"worker d0 has failed .* taken back from: p0; no answer"):
            await loading
        assert [(each.label.generation, each.retired) for each in p0.load().adapters] == [(7, True)]
        may_go_on.set()
        await stopping
