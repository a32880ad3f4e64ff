"""Cache events on their way out: merged into small changes, bounded, replaced by a snapshot if too many waited."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.events import CacheEvent, Tier
from kvstore.redis_keys import index_keys

# Keys in one change: about 20 kB, 1 ms of an event loop, and small beside Redis's 16 kB socket reads.
KEYS_PER_CHANGE = 1024


@dataclass(frozen=True, slots=True)
class Change:
    """The net effect of consecutive events of a tier, as 16-byte keys. Order: cleared, removed, stored."""

    cleared: bool
    removed: tuple[bytes, ...]
    stored: tuple[bytes, ...]
    tier: Tier = "device"


class ChangeBuffer:
    """A queue of events that forgets rather than grows; thread-safe.

    Only the last thing that happened to a key matters, so merging loses nothing, and events that a snapshot already
    contains may be replayed onto it: for every key the last event decides, and it is in the snapshot or still to come.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._snapshot: deque[tuple[Tier, Sequence[bytes]]] = deque()  # goes out before any event
        self._events: deque[CacheEvent] = deque()
        self._num_keys = 0
        self._overflowed = False

    @property
    def overflowed(self) -> bool:
        """True if events were dropped: only a snapshot can help now."""
        return self._overflowed

    @property
    def is_empty(self) -> bool:
        return not self._snapshot and not self._events

    def add(self, events: Iterable[CacheEvent]) -> None:
        """Appends events; drops them all once more than `max_keys` wait."""
        with self._lock:
            if self._overflowed:
                return
            for event in events:
                self._events.append(event)
                self._num_keys += max(len(event.keys), 1)
            if self._num_keys > self._max_keys:
                self._overflowed = True
                self._clear()

    def restart(self, snapshot: Callable[[], Mapping[Tier, Sequence[bytes]]]) -> None:
        """Drops what waits and takes a snapshot, by tier, instead; events that arrive meanwhile go out after it."""
        with self._lock:
            self._overflowed = False
            self._clear()
        held = snapshot()
        with self._lock:
            for tier, keys in held.items():
                pieces = (keys[i : i + KEYS_PER_CHANGE] for i in range(0, len(keys), KEYS_PER_CHANGE))
                self._snapshot.extend((tier, piece) for piece in pieces)

    def take(self) -> Change | None:
        """The next change, at most `KEYS_PER_CHANGE` keys; None if nothing waits."""
        with self._lock:
            if self._snapshot:
                tier, keys = self._snapshot.popleft()
                return Change(False, (), tuple(index_keys(keys)), tier)
            if not self._events:
                return None
            return self._merge()

    def _merge(self) -> Change:
        cleared = False
        held_after: dict[bytes, bool] = {}
        room, tier = KEYS_PER_CHANGE, self._events[0].tier
        while self._events and room > 0 and self._events[0].tier == tier:
            event = self._events.popleft()
            keys = event.keys[:room]
            if len(keys) < len(event.keys):
                self._events.appendleft(CacheEvent(event.kind, event.keys[room:], tier))
            size = max(len(keys), 1)
            room -= size
            self._num_keys -= size
            if event.kind == "cleared":
                cleared = True
                held_after.clear()
            else:
                # A key moves to the end, so that parents still come before children.
                for key in index_keys(keys):
                    held_after.pop(key, None)
                    held_after[key] = event.kind == "stored"
        removed = () if cleared else tuple(key for key, held in held_after.items() if not held)
        return Change(cleared, removed, tuple(key for key, held in held_after.items() if held), tier)

    def _clear(self) -> None:
        self._snapshot.clear()
        self._events.clear()
        self._num_keys = 0
