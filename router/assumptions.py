"""What the router assumes of its own last decisions until workers report them: blocks soon cached, work soon queued."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
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
        self._recent: deque[_Routed] = deque()  # those of them that are load still, summed up in `_loads`
        self._loads: dict[str, AssumedLoad] = {}
        self._until: dict[tuple[str, bytes], float] = {}
        self._index = MemoryIndex()

    def note_routed(
        self, worker_id: str, keys: Iterable[bytes], now: float, *, num_tokens: int = 0, num_sequences: int = 1
    ) -> None:
        """A prompt with these keys and so many uncached tokens was sent to the worker."""
        self._forget(now)
        routed = _Routed(now, worker_id, tuple(index_keys(keys)), num_tokens, num_sequences)
        self._routed.append(routed)
        self._recent.append(routed)
        self._add_load(worker_id, num_tokens, num_sequences)
        if worker_id not in self._index.workers():
            self._index.register(WorkerRecord(worker_id, "", "decode", 0))
        self._index.store(worker_id, routed.keys)
        for key in routed.keys:
            self._until[worker_id, key] = now + HIT_SECONDS

    def hits(self, keys: Sequence[bytes], worker_ids: Sequence[str], now: float) -> dict[str, int]:
        """Leading blocks that each worker has or is about to compute, as far as this router sent them there."""
        self._forget(now)
        return self._index.lookup(keys, worker_ids)

    def loads(self, now: float) -> Mapping[str, AssumedLoad]:
        """What was sent to each worker within the last 250 ms; workers that were sent nothing are not in it.

        A sum that is kept, as every request asks: a thousand a second would each add up 250. Valid until the next call.
        """
        self._forget(now)
        return self._loads

    def forget_worker(self, worker_id: str) -> None:
        """The process is gone, and with it what it was sent."""
        self._routed = deque(each for each in self._routed if each.worker_id != worker_id)
        self._recent = deque(each for each in self._recent if each.worker_id != worker_id)
        self._loads.pop(worker_id, None)
        for key in self._index.blocks(worker_id):
            del self._until[worker_id, key]
        self._index.unregister(worker_id)

    def keep_only(self, worker_ids: Set[str]) -> None:
        """Everybody else is gone: where names are never used again, they would be remembered for ever."""
        for worker_id in self._index.workers().keys() - worker_ids:
            self.forget_worker(worker_id)

    def _add_load(self, worker_id: str, num_tokens: int, num_sequences: int) -> None:
        known = self._loads.get(worker_id)
        if known is not None:
            num_tokens, num_sequences = num_tokens + known.num_tokens, num_sequences + known.num_sequences
        if num_tokens or num_sequences:
            self._loads[worker_id] = AssumedLoad(num_tokens, num_sequences)
        else:
            self._loads.pop(worker_id, None)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0].at <= now - LOAD_SECONDS:
            sent = self._recent.popleft()
            self._add_load(sent.worker_id, -sent.num_tokens, -sent.num_sequences)
        while self._routed and self._routed[0].at + HIT_SECONDS <= now:
            routed = self._routed.popleft()
            old = [key for key in routed.keys if self._until.get((routed.worker_id, key), 0.0) <= now]
            for key in old:
                self._until.pop((routed.worker_id, key), None)
            self._index.remove(routed.worker_id, old)
