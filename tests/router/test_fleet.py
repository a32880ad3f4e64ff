"""The fleet over real gRPC: who is found, who is alive, and what silence, restarts and moves do."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio

from kvstore.memory_index import MemoryIndex
from kvstore.registry import WorkerRecord
from pagewire.worker_view import LoadSnapshot
from router.fleet import Fleet
from tests.kvstore.simulated import until
from tests.router.watched_worker import WatchedWorker

pytestmark = pytest.mark.timeout(180)


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[list[WatchedWorker]]:
    """A prefill and a decode worker; whatever a test appends is stopped too."""
    workers = [await WatchedWorker("p", "prefill").start(), await WatchedWorker("d").start()]
    yield workers
    for worker in workers:
        await worker.stop()


@pytest_asyncio.fixture
async def index() -> MemoryIndex:
    return MemoryIndex()


@pytest_asyncio.fixture
async def fleet(index: MemoryIndex) -> AsyncIterator[Fleet]:
    """Workers come from the registry alone."""
    fleet = Fleet(index=index, silence_seconds=0.5, forget_seconds=0.3)
    await fleet.start()
    yield fleet
    await fleet.stop()


def register(index: MemoryIndex, fleet: Fleet, worker: WatchedWorker) -> None:
    description = worker.description
    index.register(WorkerRecord(description.worker_id, worker.address, description.role, description.incarnation))
    fleet.refresh()


def unregister(index: MemoryIndex, fleet: Fleet, worker: WatchedWorker) -> None:
    index.unregister(worker.description.worker_id)
    fleet.refresh()


async def test_fixed_addresses_need_no_registry(workers: list[WatchedWorker]) -> None:
    fleet = Fleet([worker.address for worker in workers])
    assert fleet.workers() == {}
    await fleet.start()
    await fleet.wait_ready(("prefill", "decode"), timeout=60)
    found = fleet.workers()
    assert {worker_id: worker.description for worker_id, worker in found.items()} == {
        worker.description.worker_id: worker.description for worker in workers
    }
    assert all(worker.is_available for worker in found.values())
    await fleet.stop()
    assert fleet.workers() == {}


async def test_wait_ready_names_what_is_missing(workers: list[WatchedWorker]) -> None:
    fleet = Fleet([workers[0].address, "127.0.0.1:1"])
    await fleet.start()
    with pytest.raises(TimeoutError, match=r"no decode worker after 0\.5 s"):
        await fleet.wait_ready(("prefill", "decode"), timeout=0.5)
    await fleet.stop()


async def test_workers_come_and_go_with_the_registry(
    fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]
) -> None:
    for worker in workers:
        register(index, fleet, worker)
    await fleet.wait_ready(("prefill", "decode"), timeout=60)
    # Out of the registry but still there: a lease that ran out, or Redis that forgot.
    unregister(index, fleet, workers[0])
    await asyncio.sleep(1.0)
    assert fleet.workers()["p"].alive
    # Gone from both.
    await workers[0].stop()
    await until(lambda: "p" not in fleet.workers())
    assert set(fleet.workers()) == {"d"}
    # In the registry and not there: known, not alive.
    await workers[1].stop()
    await until(lambda: not fleet.workers()["d"].alive)
    await asyncio.sleep(0.5)
    assert set(fleet.workers()) == {"d"}


async def test_load_and_draining_arrive(fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]) -> None:
    register(index, fleet, workers[1])
    await fleet.wait_ready(("decode",), timeout=60)
    load = LoadSnapshot(1, 2, 3, 4, 5, False, 7)
    workers[1].say(load)
    await until(lambda: fleet.workers()["d"].load == load)
    workers[1].say(replace(load, draining=True))
    await until(lambda: not fleet.workers()["d"].is_available)
    assert fleet.workers()["d"].alive


async def test_silence_is_death_and_speech_is_life(
    fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]
) -> None:
    """A stopped process keeps its connection open; only its silence tells."""
    changes: list[bool] = []
    fleet.on_change = lambda: changes.append(fleet.workers()["d"].alive)
    register(index, fleet, workers[1])
    await fleet.wait_ready(("decode",), timeout=60)
    process = fleet.workers()["d"].description
    workers[1].silent = True
    silent_since = time.monotonic()
    await until(lambda: not fleet.workers()["d"].alive)
    assert 0.3 < time.monotonic() - silent_since < 30
    found = fleet.find("d", process.incarnation)
    assert found is not None
    assert not found.alive
    workers[1].silent = False
    await until(lambda: fleet.workers()["d"].alive)
    assert changes[0]
    assert not all(changes)


async def test_b1_a_restart_on_the_same_port_is_another_process(
    fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]
) -> None:
    seen: list[tuple[str, int, int]] = []
    fleet.on_new_incarnation = lambda *change: seen.append(change)
    register(index, fleet, workers[1])
    await fleet.wait_ready(("decode",), timeout=60)
    old = workers[1].description
    await workers[1].restart()
    new = workers[1].description
    await until(lambda: fleet.find("d", new.incarnation) is not None)
    await until(lambda: fleet.workers()["d"].alive)
    assert fleet.find("d", old.incarnation) is None
    assert seen == [("d", old.incarnation, new.incarnation)]


async def test_a_worker_that_moved_leaves_its_old_address(
    fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]
) -> None:
    register(index, fleet, workers[1])
    await fleet.wait_ready(("decode",), timeout=60)
    moved = await WatchedWorker("d").start()
    workers.append(moved)
    await workers[1].stop()
    register(index, fleet, moved)
    await until(lambda: fleet.find("d", moved.description.incarnation) is not None)
    await until(lambda: fleet.workers()["d"].alive)
    assert fleet.workers()["d"].description.endpoint == moved.address
    await until(lambda: set(fleet._links) == {moved.address})


async def test_two_addresses_of_one_process_are_one_worker(index: MemoryIndex, workers: list[WatchedWorker]) -> None:
    port = workers[1].address.rpartition(":")[2]
    fleet = Fleet([f"localhost:{port}", workers[1].address], index)
    await fleet.start()
    await fleet.wait_ready(("decode",), timeout=60)
    await until(lambda: sum(link.alive for link in fleet._links.values()) == 2)
    assert set(fleet.workers()) == {"d"}
    await fleet.stop()


async def test_a_worker_that_does_not_say_who_it_is_is_nobody(
    fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]
) -> None:
    workers[1].without_info = True
    register(index, fleet, workers[1])
    await asyncio.sleep(0.5)
    assert fleet.workers() == {}
    workers[1].without_info = False
    await fleet.wait_ready(("decode",), timeout=60)


async def test_a_channel_outlives_the_worker(fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]) -> None:
    """Requests in flight ask for the channel of a worker that has just been forgotten; they get an error."""
    register(index, fleet, workers[1])
    await fleet.wait_ready(("decode",), timeout=60)
    address = workers[1].address
    channel = fleet.channel("d", address)
    assert channel is fleet.workers()["d"].channel
    await workers[1].stop()
    unregister(index, fleet, workers[1])
    await until(lambda: not fleet.workers())
    spare = fleet.channel("d", address)
    assert spare is fleet.channel("d", address)
    call = spare.unary_unary("/pagewire.v1.AdminService/GetStatus")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_channels_to_where_nobody_is_watched_are_closed_in_the_end(
    fleet: Fleet, index: MemoryIndex, workers: list[WatchedWorker]
) -> None:
    register(index, fleet, workers[0])
    first = fleet.channel("gone", "127.0.0.1:1")
    assert fleet.channel("gone", "127.0.0.1:1") is first
    await until(lambda: "127.0.0.1:1" not in fleet._spare_channels)
    with pytest.raises(grpc.aio.UsageError):
        await first.unary_unary("/pagewire.v1.AdminService/GetStatus")(b"")
    assert fleet.channel("gone", "127.0.0.1:1") is not first
