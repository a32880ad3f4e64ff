"""The relay of KV events: a block is held while one worker holds it, and a worker that is gone holds nothing."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from pagewire import rpc
from pagewire.foreign.smg import common_pb2 as pb
from pagewire.foreign.smg import vllm_engine_pb2_grpc
from router.fleet import Fleet
from router.vllm_engine.kv_relay import KvRelay
from tests.router.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker
from tests.router.system import eventually


class Events(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Sends what a test puts into the queue."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[pb.KvEventBatch] = asyncio.Queue()

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[pb.KvEventBatch]:
        while True:
            yield await self.queue.get()

    def stored(self, *hashes: int, parent: int | None = None) -> None:
        blocks = [pb.KvBlock(block_hash=each, token_ids=[abs(each)], block_size=1) for each in hashes]
        event = pb.KvCacheEvent(stored=pb.KvBlocksStored(blocks=blocks))
        if parent is not None:
            event.stored.parent_block_hash = parent
        self.queue.put_nowait(pb.KvEventBatch(events=[event]))

    def removed(self, *hashes: int) -> None:
        event = pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=hashes))
        self.queue.put_nowait(pb.KvEventBatch(events=[event]))


async def test_the_union_of_all_workers(tmp_path: Path) -> None:
    workers: list[ScriptedWorker] = [ScriptedPrefill(), ScriptedDecode()]
    one, two = Events(), Events()
    for worker, events in zip(workers, (one, two), strict=True):
        worker.more_services = [_adds(events)]
        await worker.start()
    fleet = Fleet([worker.endpoint for worker in workers], silence_seconds=1.0)
    relay = KvRelay(fleet)
    await fleet.start()
    relay.start()
    relay.start()

    def held() -> list[tuple[int, int | None]]:
        """(hash, parent) in the snapshot's order."""

        def number(key: bytes | None) -> int | None:
            return None if key is None else int.from_bytes(key, "big", signed=True)

        return [(number(block.key) or 0, number(block.parent)) for block in relay.journal_snapshot()[1]]

    try:
        one.stored(-1, 2)
        await eventually(lambda: held() == [(-1, None), (2, -1)])
        two.stored(-1, 2, 3)
        await eventually(lambda: held() == [(-1, None), (2, -1), (3, 2)])
        seq, _ = relay.journal_snapshot()
        one.removed(2)
        one.stored(4, parent=-1)
        await eventually(lambda: (4, -1) in held())
        assert (2, -1) in held()  # the other one has it
        await workers[1].kill()
        await eventually(lambda: held() == [(-1, None), (4, -1)])
        changes = [change for batch in relay.journal_since(seq) for change in batch.changes]
        assert len(changes) == 2  # one block came, and what the dead worker alone had is gone at once
    finally:
        await relay.close()
        await fleet.stop()
        for worker in workers:
            await worker.kill()


async def test_a_partition_heals(tmp_path: Path) -> None:
    worker, events = ScriptedDecode(), Events()
    worker.more_services = [_adds(events)]
    await worker.start()
    channels: list[grpc.aio.Channel] = []

    def connect(address: str) -> grpc.aio.Channel:
        channels.append(rpc.channel(address))
        return channels[-1]

    fleet = Fleet([worker.endpoint], connect=connect)
    relay = KvRelay(fleet)
    await fleet.start()
    relay.start()
    try:
        events.stored(1)
        await eventually(lambda: len(relay.journal_snapshot()[1]) == 1, seconds=60)
        # As when the fleet forgets the worker: its channel closes, which cancels who reads from it.
        await fleet.stop()
        await eventually(lambda: not relay.journal_snapshot()[1], seconds=60)
        await fleet.start()
        while not events.queue.empty():
            events.queue.get_nowait()
        await eventually(lambda: len(channels) == 2 and bool(fleet.workers()), seconds=60)
        events.stored(2)
        events.stored(3)  # the first may be taken by the stream that broke
        await eventually(lambda: bool(relay.journal_snapshot()[1]), seconds=60)
    finally:
        await relay.close()
        await fleet.stop()
        await worker.kill()


async def test_it_stops_with_the_last_follower(tmp_path: Path) -> None:
    worker, events = ScriptedDecode(), Events()
    worker.more_services = [_adds(events)]
    await worker.start()
    fleet = Fleet([worker.endpoint])
    relay = KvRelay(fleet)
    await fleet.start()
    try:
        relay.start()
        relay.start()
        events.stored(1)
        await eventually(lambda: len(relay.journal_snapshot()[1]) == 1, seconds=60)
        await relay.stop()
        events.stored(2)
        await eventually(lambda: len(relay.journal_snapshot()[1]) == 2, seconds=60)
        await relay.stop()
        assert relay.journal_snapshot()[1] == []
        relay.start()
        numbers = count(3)

        def is_followed() -> bool:
            """What the cancelled stream still takes is gone, so there is always one more."""
            events.stored(next(numbers))
            return bool(relay.journal_snapshot()[1])

        await eventually(is_followed, seconds=60)
        await relay.stop()
    finally:
        await relay.close()
        await fleet.stop()
        await worker.kill()


def _adds(events: Events) -> Any:
    return lambda server: vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(events, server)
