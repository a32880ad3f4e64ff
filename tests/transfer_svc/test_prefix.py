"""Reads of one-sided planes: a frozen peer stops its own reads and nobody else's, and costs no blocks that came."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from engine.host import EngineHost
from engine.transfer.landing import Landing
from engine.transfer.plane import Plane, PlaneUnavailable, RemoteBlock
from pagewire.worker_metrics import WorkerMetrics
from tests.decode_svc.harness import until
from tests.engine.fake_engine import fake_engine
from transfer_svc.client import ReadyBlocks
from transfer_svc.prefix import VerifiedPrefix
from transfer_svc.reservations import Reservations

SIZE, NUM_BLOCKS = 4, 400


class Frozen:
    """Reads `num_good` times, then waits until it is told to go on, and fails; bytes may land until `is_over`."""

    plane = Plane.NIXL

    def __init__(self, num_good: int = 0) -> None:
        self.num_good = num_good
        self.num_waiting = 0
        self.lengths: list[int] = []
        self.go_on = threading.Event()
        self.is_over = False

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        assert landing is not None
        self.lengths.append(len(blocks))
        if len(self.lengths) <= self.num_good:
            return
        self.num_waiting += 1
        assert self.go_on.wait(60)
        landing.leave(lambda: self.is_over)
        raise PlaneUnavailable("frozen")

    def close(self) -> None: ...


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[EngineHost[None], Callable[[int], VerifiedPrefix], Reservations]]:
    """A host, a maker of prefixes of so many blocks, and their reservations."""
    engine, _ = fake_engine(num_blocks=NUM_BLOCKS, block_size=SIZE, max_model_len=SIZE * NUM_BLOCKS)
    metrics = WorkerMetrics(CollectorRegistry(), "m")
    host: EngineHost[None] = EngineHost(engine, metrics, prepare=lambda _: None, on_step=lambda *_: None)
    await host.start()
    reservations = Reservations(engine.kv_cache, host.wait_for_change, lambda: 0, 60.0)

    def make(num_blocks: int) -> VerifiedPrefix:
        return VerifiedPrefix([i % 7 for i in range(num_blocks * SIZE)], host, reservations, metrics)

    try:
        yield host, make, reservations
    finally:
        await host.stop_engine()
        await host.stop()
        engine.close()
    assert engine.kv_cache.num_referenced == 0


async def take(
    prefix: VerifiedPrefix, receiver: Frozen, turns: asyncio.Semaphore, reservations: Reservations, num_blocks: int
) -> None:
    await prefix.match("")
    prefix.cover(num_blocks * SIZE)
    ready = ReadyBlocks(b"t", 1, 0, (RemoteBlock(0, 1, 0),) * num_blocks, tuple(prefix.keys))
    mine = reservations.open()
    try:
        async with mine.preemptible():
            await prefix.take_ready(ready, receiver, turns, mine)
    finally:
        reservations.close(mine)


async def test_a_frozen_peer_stops_its_own_reads_alone() -> None:
    async with serving() as (host, make, reservations):
        frozen, healthy = Frozen(), Frozen(num_good=1)
        turns = asyncio.Semaphore(2)
        stuck = [asyncio.create_task(take(make(3), frozen, turns, reservations, 3)) for _ in range(8)]
        await until(lambda: frozen.num_waiting == 2)
        assert await asyncio.wait_for(host.in_thread(lambda: 7), 30) == 7, "key hashing and frames go on"
        prefix = make(2)
        await asyncio.wait_for(take(prefix, healthy, asyncio.Semaphore(2), reservations, 2), 30)
        assert prefix.num_blocks == 2, "so do other peers"
        assert frozen.num_waiting == 2
        prefix.release()
        for task in stuck[2:]:
            task.cancel()  # waiting for a turn ends at once
        await asyncio.wait_for(asyncio.wait(stuck[2:]), 30)
        assert host.quarantine.num_blocks == 0
        frozen.is_over = True
        frozen.go_on.set()
        for result in await asyncio.gather(*stuck[:2], return_exceptions=True):
            assert isinstance(result, PlaneUnavailable)
        assert turns._value == 2


async def test_what_came_before_a_sender_froze_is_kept_and_one_read_is_held() -> None:
    async with serving() as (host, make, reservations):
        frozen, prefix = Frozen(num_good=2), make(200)
        frozen.go_on.set()
        with pytest.raises(PlaneUnavailable):
            await take(prefix, frozen, asyncio.Semaphore(2), reservations, 200)
        assert frozen.lengths == [64, 64, 64]
        assert prefix.num_blocks == 128
        assert host.quarantine.num_blocks == 64
        frozen.is_over = True
        await until(lambda: host.quarantine.num_blocks == 0)
        prefix.release()


async def test_blocks_stay_held_while_nobody_can_say_whether_the_read_is_over(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (host, *_):
        landing = Landing()
        answers: list[Exception | bool] = [RuntimeError("a bug"), RuntimeError("a bug"), RuntimeError("a bug")]

        def is_over() -> bool:
            answer = answers.pop(0) if answers else True
            if isinstance(answer, Exception):
                raise answer
            return answer

        landing.leave(is_over)
        host.quarantine.release(host.kv_cache.allocate(3), landing)
        await until(lambda: len(answers) < 2)
        assert host.kv_cache.num_referenced == 3
        await until(lambda: host.kv_cache.num_referenced == 0)
        assert caplog.text.count("it is not known") == 1
        landing.leave(lambda: bool(1 / 0))
        host.quarantine.release(host.kv_cache.allocate(2), landing)  # held until the host stops: its planes are closed
