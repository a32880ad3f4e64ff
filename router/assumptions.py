"""What the router assumes of its own last decisions until workers report them: blocks soon cached, work soon queued."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.memory_index import MemoryIndex
from kvstore.redis_keys import index_keys
from kvstore.registry import WorkerRecord

HIT_SECONDS = 2.0
LOAD_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class AssumedLoad:
    """Work sent to a worker that its load message cannot contain yet."""

    num_tokens: int = 0
    num_sequences: int = 0


@dataclass(frozen=True, slots=True)
class _Routed:
    at: float
    worker_id: str
    keys: tuple[bytes, ...]
    num_tokens: int
    num_sequences: int


class Assumptions:
    """Forgets by itself: hits after 2 s (the index tells by then), load after 250 ms (a load message comes each 100).

    So of two equal prompts in one burst the second goes where the first went, and unequal ones spread out. `now` is
    any monotonic clock in seconds.
    """

    def __init__(self) -> None:
        self._routed: deque[_Routed] = deque()
        self._until: dict[tuple[str, bytes], float] = {}
        self._index = MemoryIndex()

    def note_routed(
        self, worker_id: str, keys: Iterable[bytes], now: float, *, num_tokens: int = 0, num_sequences: int = 1
    ) -> None:
        """A prompt with these keys and so many uncached tokens was sent to the worker."""
        self._forget(now)
        routed = _Routed(now, worker_id, tuple(index_keys(keys)), num_tokens, num_sequences)
        self._routed.append(routed)
        if worker_id not in self._index.workers():
            self._index.register(WorkerRecord(worker_id, "", "decode", 0))
        self._index.store(worker_id, routed.keys)
        for key in routed.keys:
            self._until[worker_id, key] = now + HIT_SECONDS

    def hits(self, keys: Sequence[bytes], worker_ids: Sequence[str], now: float) -> dict[str, int]:
        """Leading blocks that each worker has or is about to compute, as far as this router sent them there."""
        self._forget(now)
        return self._index.lookup(keys, worker_ids)

    def loads(self, now: float) -> dict[str, AssumedLoad]:
        """What was sent to each worker within the last 250 ms; workers that were sent nothing are not in it."""
        num_tokens, num_sequences = Counter[str](), Counter[str]()
        for each in reversed(self._routed):
            if each.at <= now - LOAD_SECONDS:
                break
            num_tokens[each.worker_id] += each.num_tokens
            num_sequences[each.worker_id] += each.num_sequences
        return {each: AssumedLoad(num_tokens[each], num_sequences[each]) for each in num_tokens}

    def forget_worker(self, worker_id: str) -> None:
        """The process is gone, and with it what it was sent."""
        self._routed = deque(each for each in self._routed if each.worker_id != worker_id)
        for key in self._index.blocks(worker_id):
            del self._until[worker_id, key]
        self._index.unregister(worker_id)

    def _forget(self, now: float) -> None:
        while self._routed and self._routed[0].at + HIT_SECONDS <= now:
            routed = self._routed.popleft()
            old = [key for key in routed.keys if self._until.get((routed.worker_id, key), 0.0) <= now]
            for key in old:
                self._until.pop((routed.worker_id, key), None)
            self._index.remove(routed.worker_id, old)
