"""Turns what the engine has computed into manifests: references on the device thread, checksums on a transfer thread.

    device thread   prepare(step): takes a reference on each newly computed block, while the request still holds it
    event loop      put(step's blocks) ──► one queue ──► checksum (transfer thread) ──► LeaseTable.extend ──► pulls wake

So a block is in a manifest only after the step that wrote it has ended, and nothing can reuse it under a reader.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.host import EngineHost
from engine.kv_cache import KvCache
from engine.request import HeldKv, PrefillProgress, StepOutput
from transfer_svc.leases import LeaseTable
from transfer_svc.manifest import describe_blocks
from transfer_svc.ticket import PrefillResult, TicketError


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Blocks of one ticket, of one KV group, that a step has finished; one reference on each is passed along."""

    request_id: str
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    group: int = 0


class BlockCollector:
    """Runs on the device thread. `watch` and `forget` may come from any thread.

    Of a KV group with a window it collects what the receiver will see: from `wanted_from` on.
    """

    def __init__(self, kv_cache: KvCache) -> None:
        self._kv_cache = kv_cache
        self._num_taken: dict[str, Counter[int]] = {}  # by group

    def watch(self, request_id: str) -> None:
        """From now on the request's blocks are collected."""
        self._num_taken[request_id] = Counter()

    def forget(self, request_id: str) -> None:
        """No more blocks of this request are wanted."""
        self._num_taken.pop(request_id, None)

    def prepare(self, step: StepOutput) -> list[ComputedBlocks]:
        """The newly computed blocks of all watched requests, with a reference on each."""
        ended = {held.request_id for held in step.held}
        running = self._computed(step, ended)
        last: list[ComputedBlocks] = []
        surplus: list[Seq[int]] = []
        for held in step.held:
            num_taken = self._num_taken.get(held.request_id)
            if num_taken is None:
                surplus.append(held.all_block_ids)
                continue
            for group, own in enumerate(held.groups):
                start = _wanted_from(held, group) + num_taken[group]
                # What was taken before comes a second time, with the request's own reference.
                surplus.append(own.block_ids[: start - own.first])
                last.append(_computed_blocks(held, group, start))
        self._acquire([block_id for blocks in running for block_id in blocks.block_ids])
        # All or nothing: until here nothing has changed for others, and what follows cannot fail.
        for blocks in running:
            if (num_taken := self._num_taken.get(blocks.request_id)) is not None:
                num_taken[blocks.group] += len(blocks.block_ids)
        for request_id in ended:
            self.forget(request_id)
        for block_ids in surplus:
            self._kv_cache.release(block_ids)
        return running + last

    def _acquire(self, block_ids: Seq[int]) -> None:
        num_acquired = 0
        try:
            for block_id in block_ids:
                self._kv_cache.acquire([block_id])
                num_acquired += 1
        except BaseException:
            self._kv_cache.release(block_ids[:num_acquired])
            raise

    def _computed(self, step: StepOutput, ended: Set[str]) -> list[ComputedBlocks]:
        """What the watched requests that go on have computed since the last step."""
        computed = []
        for progress in step.progress:
            num_taken = self._num_taken.get(progress.request_id)
            if num_taken is None or progress.request_id in ended:
                continue
            stop = progress.num_computed_tokens // self._kv_cache.block_size
            for group in range(len(progress.groups)):
                start = _wanted_from(progress, group) + num_taken[group]
                if start < stop:
                    computed.append(_computed_blocks(progress, group, start, stop))
        return computed


def _wanted_from(held: PrefillProgress | HeldKv, group: int) -> int:
    return held.wanted_from[group] if held.wanted_from else 0


def _computed_blocks(held: PrefillProgress | HeldKv, group: int, start: int, stop: int | None = None) -> ComputedBlocks:
    """Its blocks number `start` to `stop` (None: to the end, which may be partial and has no key)."""
    blocks = held.groups[group]
    block_ids = blocks.block_ids[start - blocks.first : None if stop is None else stop - blocks.first]
    keys = held.keys[start : start + len(block_ids)]
    return ComputedBlocks(held.request_id, block_ids, keys + (b"",) * (len(block_ids) - len(keys)), group)


@dataclass(frozen=True, slots=True)
class _Addition:
    ticket: bytes
    blocks: ComputedBlocks


@dataclass(frozen=True, slots=True)
class _Completion:
    ticket: bytes
    result: PrefillResult


class ManifestWriter:
    """One task that checksums blocks and adds them to their tickets, in the order in which they were computed."""

    def __init__(
        self,
        host: EngineHost[list[ComputedBlocks]],
        leases: LeaseTable,
        clock: Callable[[], float],
        on_change: Callable[[bytes], None],
    ) -> None:
        self._host = host
        self._leases = leases
        self._clock = clock
        self._on_change = on_change
        self._queue: asyncio.Queue[_Addition | _Completion] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._host.supervise(self._run(), "manifest-writer")

    async def stop(self) -> None:
        """Ends the task and releases what still waits for it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, _Addition):
                self._host.kv_cache.release(item.blocks.block_ids)

    def add(self, ticket: bytes, blocks: ComputedBlocks) -> None:
        """The ticket gets these blocks soon; if it is gone by then, their references are released."""
        self._queue.put_nowait(_Addition(ticket, blocks))

    def complete(self, ticket: bytes, result: PrefillResult) -> None:
        """The ticket's last blocks have been added; its lease starts."""
        self._queue.put_nowait(_Completion(ticket, result))

    async def _run(self) -> None:
        while True:
            item = await self._queue.get()
            if isinstance(item, _Addition):
                await self._extend(item)
            else:
                self._complete(item)
            self._on_change(item.ticket)

    async def _extend(self, item: _Addition) -> None:
        blocks = item.blocks
        extended = False
        try:
            manifest = await self._host.in_thread(describe_blocks, self._host.memory, blocks.block_ids, blocks.keys)
            self._leases.extend(item.ticket, manifest, blocks.group)
            extended = True
        except TicketError:
            return  # the request was cancelled meanwhile
        finally:
            if not extended:
                self._host.kv_cache.release(blocks.block_ids)

    def _complete(self, item: _Completion) -> None:
        try:
            self._host.kv_cache.release(self._leases.complete(item.ticket, item.result, self._clock()))
        except TicketError:
            return  # likewise
