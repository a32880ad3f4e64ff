"""Simulated workers around the real block pool: virtual time, prefill one after the other, decode in one batch."""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

from bench.routing.workload import BLOCK, Chat
from kvstore.block_pool import BlockPool
from kvstore.memory_index import MemoryIndex
from kvstore.redis_keys import index_keys
from kvstore.registry import WorkerRecord
from pagewire.worker_view import LoadSnapshot, WorkerDescription, WorkerFingerprint, WorkerRole

ROOT = b"r" * 32
FINGERPRINT = WorkerFingerprint(ROOT, "bm", "sim", BLOCK, (1,))


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulated workers are. Seconds and tokens; a decode worker's pool is `decode_pool` prefill workers'.

    A prefill step takes `prefill_step_seconds` and computes all prompts that wait, as long as together they have no
    more than `prefill_step_tokens` tokens to compute; 0: one after the other.
    """

    num_prefill: int = 4
    num_decode: int = 4
    prefill_rate: float = 20_000.0
    prefill_step_seconds: float = 0.0
    prefill_step_tokens: int = 0
    step_seconds: float = 0.010
    step_per_sequence: float = 0.0002
    max_num_seqs: int = 256
    lag_seconds: float = 0.005
    hand_off_seconds: float = 0.010
    fetch_rate: float = 0.0  # 0: workers do not fetch from each other
    fetch_seconds: float = 0.010
    overhead_seconds: float = 0.0
    decode_pool: int = 4


@dataclass(slots=True)
class Request:
    """One turn: keys of prompt and answer, both whole blocks plus one token that is never cached."""

    arrived: float
    keys: list[bytes]
    num_prompt_blocks: int
    num_output_tokens: int
    chat: Chat[bytes]
    decode: "Decode | None" = None
    first_token: float = 0.0
    num_hit_blocks: int = 0
    num_expected_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_prompt_blocks * BLOCK + 1

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_hit_blocks * BLOCK


class Clock:
    """Virtual time and what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._count), call))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()


@dataclass(slots=True)
class World:
    """What all workers share; `finished` hears of requests that have ended.

    `slowness`: how much longer than the machine says the next request's way to its first token takes.
    """

    machine: Machine
    lag_seconds: float
    clock: Clock
    index: MemoryIndex
    finished: Callable[[Request], None]
    slowness: Callable[[], float] = lambda: 1.0


class Worker:
    """A pool, and the index that hears of it later."""

    role: WorkerRole

    def __init__(self, name: str, num_blocks: int, world: World) -> None:
        self.pool = BlockPool(num_blocks)
        self.world = world
        self.description = WorkerDescription(
            name, 1, self.role, name, "sim", FINGERPRINT, 1 << 20, num_blocks, world.machine.max_num_seqs, 8192, 1
        )
        world.index.register(WorkerRecord(name, name, self.role, 1))

    def take(self, keys: Sequence[bytes], num_blocks: int) -> tuple[list[int], int] | None:
        """Blocks for a sequence and how many of them are hits; None if there is no room."""
        held = self.pool.match(keys, [0] * len(keys), 1)
        new = self.pool.allocate(num_blocks - len(held))
        if new is None:
            self.pool.release(held)
            return None
        self.publish()
        return held + new, len(held)

    def depth(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that are here: what a pool holds of a chain is prefix-closed."""
        return bisect_left(range(len(keys)), True, key=lambda number: not self.pool.is_cached(keys[number]))

    def commit(self, block_ids: list[int], keys: Sequence[bytes]) -> None:
        for position, key in enumerate(keys):
            block_ids[position] = self.pool.commit(block_ids[position], key, (0,))
        self.publish()

    def publish(self) -> None:
        events = self.pool.take_events()
        if not events:
            return
        name, index = self.description.worker_id, self.world.index

        def apply() -> None:
            for event in events:
                (index.store if event.kind == "stored" else index.remove)(name, index_keys(event.keys))

        if self.world.lag_seconds:
            self.world.clock.after(self.world.lag_seconds, apply)
        else:
            apply()


class Prefill(Worker):
    """Step by step: one prompt, or all that wait and fit."""

    role: WorkerRole = "prefill"

    def __init__(self, name: str, num_blocks: int, world: World) -> None:
        super().__init__(name, num_blocks, world)
        self._queue: deque[Request] = deque()
        self._running: dict[int, Request] = {}

    def load(self) -> LoadSnapshot:
        """As a worker counts: of a waiting prompt what the router expects."""
        queued = sum(each.num_prompt_tokens - each.num_expected_tokens for each in self._queue)
        queued += sum(each.num_uncached_tokens for each in self._running.values())
        return LoadSnapshot(
            num_running=len(self._running),
            num_waiting=len(self._queue),
            num_queued_tokens=queued,
            num_free_blocks=self.pool.num_free,
        )

    def add(self, request: Request, sources: Sequence[Worker] = ()) -> None:
        """Fetches first what another worker has more of it, if that is cheaper than to compute it."""
        keys, machine = request.keys[: request.num_prompt_blocks], self.world.machine
        source = max(sources, key=lambda each: each.depth(keys), default=self)
        num_tokens = BLOCK * (source.depth(keys) - self.depth(keys))
        seconds = machine.fetch_seconds + num_tokens / machine.fetch_rate if machine.fetch_rate else inf
        if seconds < num_tokens / machine.prefill_rate:
            self.world.clock.after(seconds, lambda: self._fetched(request, keys[: source.depth(keys)]))
        else:
            self._enqueue(request)

    def _fetched(self, request: Request, keys: Sequence[bytes]) -> None:
        taken = self.take(keys, len(keys))
        if taken is not None:
            self.commit(taken[0], keys)
            self.pool.release(taken[0])
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._queue.append(request)
        self._next()

    def _next(self) -> None:
        if self._running:
            return
        machine, step, num_tokens = self.world.machine, list[tuple[Request, list[int]]](), 0
        while self._queue:
            request = self._queue[0]
            keys = request.keys[: request.num_prompt_blocks]
            lacking = request.num_prompt_tokens - self.depth(keys) * BLOCK
            if step and num_tokens + lacking > machine.prefill_step_tokens:
                break
            taken = self.take(keys, request.num_prompt_blocks + 1)
            if taken is None:
                break  # blocks are held for a hand-off; its end comes back here
            self._queue.popleft()
            request.num_hit_blocks = taken[1]
            step.append((request, taken[0]))
            num_tokens += request.num_uncached_tokens
            self._running[id(request)] = request
        if step:
            slowness = self.world.slowness()
            seconds = machine.prefill_step_seconds + num_tokens / machine.prefill_rate
            self.world.clock.after(slowness * seconds, lambda: self._done(step, slowness))

    def _done(self, step: Sequence[tuple[Request, list[int]]], slowness: float) -> None:
        self._running.clear()
        for request, block_ids in step:
            self.commit(block_ids, request.keys[: request.num_prompt_blocks])
            request.first_token = self.world.clock.now + slowness * self.world.machine.overhead_seconds
            self.world.clock.after(self.world.machine.hand_off_seconds, partial(self._handed_off, request, block_ids))
        self._next()

    def _handed_off(self, request: Request, block_ids: list[int]) -> None:
        self.pool.release(block_ids)
        assert request.decode is not None
        request.decode.add(request)
        self._next()


class Decode(Worker):
    """Continuous batching: each sequence gets a token per step, whose length grows with the batch."""

    role: WorkerRole = "decode"

    def __init__(self, name: str, num_blocks: int, world: World) -> None:
        super().__init__(name, num_blocks, world)
        self._waiting: deque[Request] = deque()
        self._num_running = 0

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            num_running=self._num_running, num_waiting=len(self._waiting), num_free_blocks=self.pool.num_free
        )

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._next()

    def _next(self) -> None:
        machine = self.world.machine
        while self._waiting and self._num_running < machine.max_num_seqs:
            request = self._waiting[0]
            taken = self.take(request.keys[: request.num_prompt_blocks], len(request.keys) + 1)
            if taken is None:
                return
            self._waiting.popleft()
            self._num_running += 1
            step = machine.step_seconds + machine.step_per_sequence * self._num_running

            def done(request: Request = request, block_ids: list[int] = taken[0]) -> None:
                self.commit(block_ids, request.keys)
                self.pool.release(block_ids)
                self._num_running -= 1
                self.world.finished(request)
                self._next()

            self.world.clock.after(request.num_output_tokens * step, done)
