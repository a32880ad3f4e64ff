"""WatchWorker's rhythm and a worker's AdminService, on a worker made of plain data."""

import asyncio
import time
from contextlib import asynccontextmanager, nullcontext

import grpc
import pytest

from pagewire.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from pagewire.worker_rpc import WorkerAdminServicer, WorkerServicer
from pagewire.worker_view import (
    LoadSnapshot,
    StatusSnapshot,
    TenantQueueSnapshot,
    TicketSnapshot,
    WorkerDescription,
    WorkerFingerprint,
)

ME = WorkerDescription(
    worker_id="p0",
    incarnation=2**63 + 1,
    role="prefill",
    endpoint="127.0.0.1:1",
    model="tiny",
    fingerprint=WorkerFingerprint(b"r" * 32, "canonical", "f32", 16, (4096,)),
    max_model_len=512,
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    vocab_size=300,
)


class FakeWorker:
    description = ME

    def __init__(self):
        self._load = LoadSnapshot(num_free_blocks=64)
        self._changed = asyncio.Event()
        self.num_waits = 0

    def load(self):
        return self._load

    def set_load(self, **values):
        self._load = LoadSnapshot(**values)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def status(self):
        ticket = TicketSnapshot("0badc0de", "leased", 2, 1500, 3, "r7", "d0/9", holder_left=True)
        return StatusSnapshot(5, 3, 2, (ticket,), (TenantQueueSnapshot("A", 4, 40),))

    async def wait_for_change(self):
        await self._changed.wait()

    def router_presence(self, router_id):
        return nullcontext()

    async def reset_prefix_cache(self):
        return 7

    def start_drain(self):
        self.set_load(draining=True)

    def cached_keys(self):
        return [b"k" * 16], 42


class NoPrefixes:
    """Tests of what it does are in tests/transfer_svc/test_prefix_admin.py."""


@asynccontextmanager
async def serving(worker, on_drain=lambda: None):
    server = grpc.aio.server()
    watches = WorkerServicer(worker)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(watches, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(WorkerAdminServicer(worker, NoPrefixes(), on_drain), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, watches
    await server.stop(None)


async def test_watch_tells_who_at_once_then_changes_at_most_every_100_ms():
    worker = FakeWorker()
    async with serving(worker) as (channel, watches):
        call = worker_pb2_grpc.WorkerServiceStub(channel).WatchWorker(worker_pb2.WatchWorkerRequest())
        first = await call.read()
        assert (first.info.worker_id, first.info.incarnation) == ("p0", 2**63 + 1)
        assert list(first.info.fingerprint.block_bytes) == [4096]
        assert first.load.num_free_blocks == 64
        started_at, loads = time.monotonic(), []
        for num_running in range(1, 30):
            worker.set_load(num_running=num_running)
            await asyncio.sleep(0.01)
        while not loads or loads[-1] != 29:
            message = await call.read()
            assert not message.HasField("info")
            loads.append(message.load.num_running)
        assert loads == sorted(loads)
        assert len(loads) <= (time.monotonic() - started_at) / 0.1 + 1
        watches.close()
        assert await call.read() is grpc.aio.EOF


async def test_watch_speaks_every_second_without_a_change():
    async with serving(FakeWorker()) as (channel, _):
        call = worker_pb2_grpc.WorkerServiceStub(channel).WatchWorker(worker_pb2.WatchWorkerRequest())
        await call.read()
        started_at = time.monotonic()
        await asyncio.wait_for(call.read(), 60)
        assert 0.8 < time.monotonic() - started_at < 30
        call.cancel()


async def test_admin():
    drained = []
    async with serving(FakeWorker(), lambda: drained.append(True)) as (channel, _):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.process, status.draining) == ("prefill", False)
        assert status.version
        (me,) = status.workers
        assert (me.info.model, me.num_cached_blocks, me.num_referenced_blocks, me.num_requests) == ("tiny", 5, 3, 2)
        assert me.alive
        (ticket,) = me.tickets
        assert (ticket.ticket_prefix, ticket.state, ticket.epoch, ticket.lease_ms) == ("0badc0de", "leased", 2, 1500)
        assert (ticket.request_id, ticket.holder, ticket.holder_left) == ("r7", "d0/9", True)
        assert [(each.tenant, each.num_requests, each.num_tokens) for each in me.queues] == [("A", 4, 40)]
        assert (await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(worker_id="p0"))).num_blocks == 7
        cached = await stub.ListCachedBlocks(admin_pb2.ListCachedBlocksRequest())
        assert (list(cached.keys), cached.seq) == ([b"k" * 16], 42)
        assert (await stub.Drain(admin_pb2.DrainRequest())).num_requests == 2
        assert drained == [True]
        assert (await stub.GetStatus(admin_pb2.GetStatusRequest())).draining


async def test_admin_of_another_worker_is_refused():
    async with serving(FakeWorker()) as (channel, _):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for call in (
            stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(worker_id="p1")),
            stub.Drain(admin_pb2.DrainRequest(worker_id="p1")),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await call
