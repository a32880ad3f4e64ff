"""A worker's cache without an engine, and the index backends it publishes to."""

import asyncio
import os
from collections.abc import Callable, Sequence

from kvstore.background import end_tasks
from kvstore.events import CacheEvent
from kvstore.index import IndexPublisher
from kvstore.memory_index import MemoryIndex, MemoryPublisher
from kvstore.redis_index import RedisIndex
from kvstore.redis_keys import index_keys
from kvstore.redis_publisher import Publisher
from kvstore.registry import ModelRecord, Role, WorkerRecord

Connect = Callable[[WorkerRecord, Callable[[], list[bytes]]], IndexPublisher]


def chain(length: int) -> list[bytes]:
    """Block keys as they are: 32 random bytes each."""
    return [os.urandom(32) for _ in range(length)]


class CacheOf:
    """A worker that caches what it is told, says so, and can die and come back under the same name."""

    def __init__(self, worker_id: str, connect: Connect, role: Role = "prefill") -> None:
        self.worker_id = worker_id
        self.held: dict[bytes, None] = {}
        self._role = role
        self._connect = connect
        self.record = self._new_record()
        self.publisher = self._connect(self.record, lambda: list(self.held))

    def _new_record(self) -> WorkerRecord:
        incarnation = int.from_bytes(os.urandom(8), "big")
        return WorkerRecord(
            self.worker_id, f"127.0.0.1:{1 + incarnation % 65535}", self._role, incarnation, capacity=64
        )

    def store(self, keys: Sequence[bytes]) -> None:
        self.held |= dict.fromkeys(keys)
        self.publisher.publish([CacheEvent("stored", tuple(keys))])

    def evict(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.held[key]
        self.publisher.publish([CacheEvent("removed", tuple(keys))])

    def clear(self) -> None:
        self.held.clear()
        self.publisher.publish([CacheEvent("cleared")])

    async def restart(self, *, clean: bool) -> None:
        """A new process with an empty cache; an unclean death deregisters nothing."""
        if clean:
            await self.publisher.stop()
        else:
            await crash(self.publisher)
        self.held.clear()
        self.record = self._new_record()
        self.publisher = self._connect(self.record, lambda: list(self.held))
        await self.publisher.start()

    @property
    def index_keys(self) -> set[bytes]:
        return set(index_keys(self.held))

    def depth(self, keys: Sequence[bytes]) -> int:
        """What a lookup must say."""
        for depth, key in enumerate(keys):
            if key not in self.held:
                return depth
        return len(keys)


async def crash(publisher: IndexPublisher) -> None:
    """Ends a publisher's task without a word to Redis."""
    if isinstance(publisher, Publisher):
        task, publisher._task = publisher._task, None
        if task is not None:
            await end_tasks(task)


class MemoryBackend:
    """The view in this process."""

    def __init__(self) -> None:
        self.index = MemoryIndex()
        self.workers: list[CacheOf] = []

    async def worker(self, worker_id: str, held: Sequence[bytes] = ()) -> CacheOf:
        worker = CacheOf(worker_id, lambda record, snapshot: MemoryPublisher(self.index, record, snapshot))
        worker.held |= dict.fromkeys(held)
        await worker.publisher.start()
        self.workers.append(worker)
        return worker

    async def settle(self) -> None:
        for worker in self.workers:
            await worker.publisher.quiesce()
        await self.index.quiesce()

    async def heal(self) -> None:
        """Nothing is ever lost."""

    async def depths(self, keys: Sequence[bytes]) -> dict[str, int]:
        await self.settle()
        return self.index.lookup(keys)

    async def close(self) -> None:
        await self.index.stop()
        for worker in self.workers:
            await worker.publisher.stop()


class RedisBackend:
    """A publisher per worker, one view, a server between them. Under a fresh root, so tests share a server."""

    def __init__(
        self, url: str, *, lease_seconds: float = 1.5, max_buffered_keys: int = 1 << 18, root: bytes | None = None
    ) -> None:
        self.url = url
        self.root = os.urandom(32) if root is None else root
        self.model = ModelRecord("tiny", self.root)
        self.lease_seconds = lease_seconds
        self.max_buffered_keys = max_buffered_keys
        self.index = self.new_view()
        self.workers: list[CacheOf] = []

    def new_view(self) -> RedisIndex:
        return RedisIndex(self.url, self.root, poll_seconds=0.2, socket_timeout=0.5)

    def connect(self, record: WorkerRecord, snapshot: Callable[[], list[bytes]]) -> Publisher:
        return Publisher(
            self.url,
            record,
            self.root,
            snapshot,
            model=self.model,
            lease_seconds=self.lease_seconds,
            socket_timeout=0.5,
            max_buffered_keys=self.max_buffered_keys,
        )

    async def worker(self, worker_id: str, held: Sequence[bytes] = ()) -> CacheOf:
        worker = CacheOf(worker_id, self.connect)
        worker.held |= dict.fromkeys(held)
        await worker.publisher.start()
        self.workers.append(worker)
        return worker

    async def settle(self, timeout: float = 20.0) -> None:
        for worker in self.workers:
            await worker.publisher.quiesce(timeout)
        await self.index.quiesce(timeout)

    async def heal(self) -> None:
        """Waits for a heartbeat of every worker, which notices what was lost behind its back."""
        await asyncio.sleep(self.lease_seconds / 3 + 0.2)

    async def depths(self, keys: Sequence[bytes]) -> dict[str, int]:
        """The view's answer; Redis's own must be the same (a busy machine: it may miss its 100 ms, or a lease end)."""
        async with asyncio.timeout(30):
            while True:
                await self.settle()
                found = self.index.lookup(keys)
                direct = await self.index.lookup_direct(keys)
                if direct == found:
                    return found
                assert direct is None or len(found) < len(self.workers), f"Redis says {direct}, the view {found}"
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        await self.index.stop()
        for worker in self.workers:
            await worker.publisher.stop()


Backend = MemoryBackend | RedisBackend


def check_equal(backend: Backend) -> None:
    """After `settle`: the index is the dump of the workers' caches."""
    assert set(backend.index.workers()) == {worker.worker_id for worker in backend.workers}
    for worker in backend.workers:
        assert backend.index.blocks(worker.worker_id) == worker.index_keys
        assert backend.index.workers()[worker.worker_id].incarnation == worker.record.incarnation
    assert backend.index.num_blocks == sum(len(worker.held) for worker in backend.workers)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for the condition to become true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
