"""What a router knows of all workers, kept right by rules alone: which event continues and who must be re-read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvstore.events import LOWER_TIERS
from kvstore.memory_index import MemoryIndex
from kvstore.redis_keys import BlockEvent
from kvstore.registry import WorkerRecord

EventId = bytes
"""As Redis writes it, b"1700000000000-3"; `moment` puts them in order."""
Position = tuple[int, int, int]

START: EventId = b"0-0"
_MAX_WAITING = 4096


class IndexView:
    """Events in, holdings out; no I/O, no clock.

    One worker's history in stream order, and what becomes of each event once its snapshot was taken at S:

        … e  e  e | S | e(seq+1)   e(seq+2)    gap, step back or new incarnation
          skipped       applied    applied     -> the worker is read again; its events wait until that is done

    Methods that return worker ids say who must be read again: `finish_read` is to be called for each of them.
    """

    def __init__(self) -> None:
        self.memory = MemoryIndex()  # of the device
        self.lower: dict[str, MemoryIndex] = {tier: MemoryIndex() for tier in LOWER_TIERS}
        self.num_reads = 0  # workers read so far, the first time included
        self.version = 0  # grows whenever who is registered, or as what, changes
        self._at: dict[str, Position] = {}  # how far into each registered worker's history the view is
        self._as_of: dict[str, EventId] = {}  # of workers that were read: the stream's last event then
        self._waiting: dict[str, list[tuple[EventId, BlockEvent]]] = {}
        self._suspects: dict[str, tuple[Position, Position]] = {}

    @property
    def is_reading(self) -> bool:
        """True while some worker waits to be read again."""
        return bool(self._waiting)

    def position(self, worker_id: str) -> Position | None:
        """How far into the worker's history the view is; None if it is not registered."""
        return self._at.get(worker_id)

    def restart(self) -> None:
        """The stream is another one, or was not followed for a while: event ids known so far mean nothing."""
        self._as_of.clear()
        self._waiting.clear()
        self._suspects.clear()

    def apply(self, event_id: EventId, event: BlockEvent) -> list[str]:
        """Takes the next event of the stream."""
        worker_id = event.worker_id
        waiting = self._waiting.get(worker_id)
        if waiting is not None:
            waiting.append((event_id, event))
            del waiting[:-_MAX_WAITING]
            return []
        at = self._at.get(worker_id)
        if at is None:
            return self.expect_read([worker_id]) if event.kind != "deregistered" else []
        as_of = self._as_of.get(worker_id)
        if as_of is not None:
            if moment(event_id) <= moment(as_of):
                return []
            del self._as_of[worker_id]  # all that follow are later
        # All at once: fields by their names take a third longer, and a router reads many thousands a second.
        _, incarnation, generation, seq, kind, cleared, removed, stored, _, tier = event
        if seq == at[2] + 1 and generation == at[1] and incarnation == at[0] and kind == "changed":  # nearly always
            self._change(worker_id, tier, cleared, removed, stored)
            self._at[worker_id] = (incarnation, generation, seq)
            return []
        return self._take_turn(event, at)

    def _take_turn(self, event: BlockEvent, at: Position) -> list[str]:
        """An event that is not the next change of a life that goes on."""
        worker_id, (incarnation, generation, seq) = event.worker_id, at
        if event.incarnation != incarnation:
            for memory in self._memories():  # what an older incarnation said is void
                memory.clear(worker_id)
            return self.expect_read([worker_id])
        if event.kind == "deregistered":
            self._forget(worker_id)
            return []
        continues = event.position == (incarnation, generation, seq + 1)
        begins = event.kind == "registered" and event.generation > generation and event.seq == 1
        if not continues and not begins:
            return self.expect_read([worker_id])
        if event.kind == "registered":
            for memory in self._memories():
                memory.clear(worker_id)
        self._change(worker_id, event.tier, event.cleared, event.removed, event.stored)
        self._at[worker_id] = event.position
        return []

    def _change(
        self, worker_id: str, tier: str, cleared: bool, removed: Sequence[bytes], stored: Sequence[bytes]
    ) -> None:
        memory = self.memory if tier == "device" else self.lower.get(tier)
        if memory is None:
            return  # a tier that this version doesn't know
        if cleared:
            memory.clear(worker_id)
        if removed:
            memory.remove(worker_id, removed)
        if stored:
            memory.store(worker_id, stored)

    def _memories(self) -> tuple[MemoryIndex, ...]:
        return self.memory, *self.lower.values()

    def expect_read(self, worker_ids: Iterable[str]) -> list[str]:
        """From now on the workers' events wait; returns those that were not being read already."""
        new = [worker_id for worker_id in worker_ids if worker_id not in self._waiting]
        for worker_id in new:
            self._waiting[worker_id] = []
        return new

    def begin_snapshot(self, record: WorkerRecord) -> None:
        """Redis has this record; its blocks are to be put into `memory` and `lower` next, in pieces.

        Until `finish_read` the view is nowhere in its history, so that a read that is broken off is noticed.
        """
        known = self.memory.workers().get(record.worker_id)
        if known is None or replace(known, generation=0, seq=0) != replace(record, generation=0, seq=0):
            self.version += 1
        self._at[record.worker_id] = (record.incarnation, 0, -1)
        for memory in self._memories():
            memory.register(record)

    def finish_read(self, worker_id: str, record: WorkerRecord | None, as_of: EventId) -> list[str]:
        """The worker is as it was when `as_of` was the stream's last id; `record` None: Redis does not have it."""
        self.num_reads += 1
        waiting = self._waiting.pop(worker_id, [])
        self._suspects.pop(worker_id, None)
        if record is None:
            self._forget(worker_id)
        else:
            self._at[worker_id] = record.position
            self._as_of[worker_id] = as_of
        for index, (event_id, event) in enumerate(waiting):
            if again := self.apply(event_id, event):
                self._waiting[worker_id] += waiting[index:]
                return again
        return []

    def reconcile(self, positions: Mapping[str, Position]) -> list[str]:
        """Compares with everybody's position in Redis; whoever is missing there has lost its lease.

        The two are not taken at the same moment, so a difference counts when the next comparison finds it unresolved.
        """
        for worker_id in self.memory.workers().keys() - positions.keys() - self._waiting.keys():
            self._forget(worker_id)
        stuck = []
        for worker_id, position in positions.items():
            if worker_id in self._waiting:
                continue
            at = self._at.get(worker_id)
            if at is None:
                stuck.append(worker_id)
                continue
            suspicion = self._suspects.pop(worker_id, None)
            if at == position:
                continue
            if suspicion is not None and not _has_caught_up(at, *suspicion):
                stuck.append(worker_id)
            else:
                self._suspects[worker_id] = (position, at)
        return self.expect_read(stuck)

    def _forget(self, worker_id: str) -> None:
        if worker_id in self.memory.workers():
            self.version += 1
            for memory in self._memories():
                memory.unregister(worker_id)
        self._at.pop(worker_id, None)
        self._as_of.pop(worker_id, None)
        self._suspects.pop(worker_id, None)


def _has_caught_up(now: Position, target: Position, before: Position) -> bool:
    return now != before and now[:2] == target[:2] and now[2] >= target[2]


def moment(event_id: EventId) -> tuple[int, int]:
    """Milliseconds of Redis's clock, and the how-manieth event in that millisecond."""
    milliseconds, _, count = event_id.partition(b"-")
    return int(milliseconds), int(count)
