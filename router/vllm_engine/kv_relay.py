"""What all workers' prefix caches hold together, as one journal: a gateway sees the system as one worker.

Each live worker's own SubscribeKvEvents is followed. A block is held as long as one worker holds it; since each worker
holds whole prefixes, so does their union. Workers are followed while somebody follows the relay.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable

import grpc

from pagewire.foreign.smg import common_pb2 as pb
from pagewire.foreign.smg import vllm_engine_pb2_grpc
from pagewire.kv_journal import Batch, Block, Event, KvJournal
from router.fleet import Fleet, FleetWorker

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_RETRY_SECONDS = 1.0
Process = tuple[str, int]


class KvRelay:
    """Each `start` is one who follows and ends with a `stop`; `close` ends all. A block's key is its 64-bit hash."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._journal = KvJournal(first_seq=1 + secrets.randbits(48))
        self._num_holders: Counter[bytes] = Counter()
        self._following: dict[Process, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_followers = 0

    def start(self) -> None:
        """One more follows. The first makes it follow the workers, those too that come later."""
        self._num_followers += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kv-relay")

    async def stop(self) -> None:
        """One less does. With the last one it follows nobody any more, and holds nothing."""
        self._num_followers -= 1
        if not self._num_followers:
            await self.close()

    async def close(self) -> None:
        """Follows nobody any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # --- as followers see it ---

    def journal_since(self, seq: int) -> list[Batch]:
        return self._journal.since(seq)

    def journal_snapshot(self) -> tuple[int, list[Block]]:
        return self._journal.snapshot()

    async def wait_for_change(self) -> None:
        await self._changed.wait()

    # --- following ---

    async def _run(self) -> None:
        try:
            while True:
                for worker in self._fleet.workers().values():
                    process = worker.description.worker_id, worker.description.incarnation
                    if worker.alive and process not in self._following:
                        task = asyncio.create_task(self._follow(worker, process), name=f"kv-events {process[0]}")
                        self._following[process] = task
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            tasks = list(self._following.values())
            self._following.clear()  # another run may begin while these end
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, worker: FleetWorker, process: Process) -> None:
        """Once. Whatever ends it, the process is followed anew if it lives."""
        try:
            await self._follow_stream(worker, process)
            await asyncio.sleep(_RETRY_SECONDS)
        finally:
            # The fleet closes the channel of a worker that it forgets, which cancels this task.
            if self._following.get(process) is asyncio.current_task():
                del self._following[process]

    async def _follow_stream(self, worker: FleetWorker, process: Process) -> None:
        """Until the stream breaks; then what the worker held is gone."""
        held: dict[bytes, None] = {}  # parents before children
        stub = vllm_engine_pb2_grpc.VllmEngineStub(worker.channel)
        stream = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        try:
            async for batch in stream:
                self._publish([each for event in batch.events for each in self._apply(event, held)])
        except grpc.aio.AioRpcError as error:
            logger.info("no KV events of worker %s: %s", process[0], error.details())
        finally:
            stream.cancel()
            self._publish(self._remove(reversed(list(held)), held))

    def _apply(self, event: pb.KvCacheEvent, held: dict[bytes, None]) -> Iterable[Event]:
        kind = event.WhichOneof("data")
        if kind == "stored":
            return self._store(_blocks(event.stored), held)
        if kind == "removed":
            return self._remove([_key(block_hash) for block_hash in event.removed.block_hashes], held)
        return self._remove(reversed(list(held)), held)

    def _store(self, blocks: Iterable[Block], held: dict[bytes, None]) -> Iterable[Event]:
        new = []
        for block in blocks:
            if block.key in held:
                continue
            held[block.key] = None
            self._num_holders[block.key] += 1
            if self._num_holders[block.key] == 1:
                self._journal.note(block)
                new.append(block.key)
        return [Event("stored", tuple(new))] if new else []

    def _remove(self, keys: Iterable[bytes], held: dict[bytes, None]) -> Iterable[Event]:
        gone = []
        for key in keys:
            if key not in held:
                continue
            del held[key]
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                gone.append(key)
        return [Event("removed", tuple(gone))] if gone else []

    def _publish(self, events: Iterable[Event]) -> None:
        self._journal.append(events)
        self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _blocks(stored: pb.KvBlocksStored) -> Iterable[Block]:
    parent = _key(stored.parent_block_hash) if stored.HasField("parent_block_hash") else None
    for block in stored.blocks:
        key = _key(block.block_hash)
        yield Block(key, parent, tuple(block.token_ids), stored.cache_salt, stored.lora_name)
        parent = key


def _key(block_hash: int) -> bytes:
    return block_hash.to_bytes(8, "big", signed=True)
