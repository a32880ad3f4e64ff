"""What changed in a prefix cache, in numbered batches with the tokens behind each key, for whoever follows it.

A follower starts from a snapshot or after the last batch that it has seen; one that has been away for too long, or has
followed another process, starts over. Times and randomness are the caller's.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

MAX_KEYS = 1 << 16


class EventLike(Protocol):
    """`kvstore.events.CacheEvent`, which this package cannot import."""

    @property
    def kind(self) -> str: ...
    @property
    def keys(self) -> tuple[bytes, ...]: ...


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to these keys: "stored", "removed" or "cleared"."""

    kind: str
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A full block: its tokens, the key of the block before it (None for a prompt's first), its adapter's name."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached any more."""


Change = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes in order. Numbers follow each other without gaps."""

    seq: int
    changes: tuple[Change, ...]


class JournalGap(LookupError):
    """What follows that number is not known here."""


class KvJournal:
    """Not thread-safe. Remembers batches up to `max_keys` keys, and every block that is cached now.

    `first_seq` should be random, so that a number of another process is not mistaken for one of this.
    """

    def __init__(self, first_seq: int = 1, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._batches: deque[Batch] = deque()
        self._num_keys = 0
        self._blocks: dict[bytes, Block] = {}
        self._noted: dict[bytes, Block] = {}  # committed since the last batch
        self._seq = first_seq

    @property
    def seq(self) -> int:
        """Number of the last batch."""
        return self._seq

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, block: Block) -> None:
        """The block is being cached; the event that says so comes with the next `append`."""
        if block.key not in self._blocks:
            self._noted.setdefault(block.key, block)

    def find(self, key: bytes) -> Block | None:
        """What is behind the key of a cached block, noted or known."""
        return self._noted.get(key) or self._blocks.get(key)

    def tails(self, starts_at: Callable[[Block], bool]) -> list[bytes]:
        """Keys of the blocks for which that holds and of all that continue them, parents before children."""
        found: dict[bytes, None] = {}
        for block in (*self._blocks.values(), *self._noted.values()):
            if block.parent in found or starts_at(block):
                found[block.key] = None
        return list(found)

    def append(self, events: Iterable[EventLike]) -> None:
        """One more batch, if anything happened: all events since the last call, in order."""
        known = self._noted
        self._noted = {}
        changes: list[Change] = []
        for event in events:
            if event.kind == "cleared":
                known |= self._blocks
                self._blocks.clear()
                changes.append(Cleared())
            elif event.kind == "stored":
                blocks = tuple(known.get(key) or self._blocks[key] for key in event.keys)
                self._blocks.update((block.key, block) for block in blocks)
                changes.append(Stored(blocks))
            else:
                known.update((key, self._blocks.pop(key)) for key in event.keys)
                changes.append(Removed(event.keys))
        if not changes:
            return
        self._seq += 1
        self._batches.append(Batch(self._seq, tuple(changes)))
        self._num_keys += _num_keys(self._batches[-1])
        while self._num_keys > self._max_keys:
            self._num_keys -= _num_keys(self._batches.popleft())

    def since(self, seq: int) -> list[Batch]:
        """Every batch after that one. Raises JournalGap if they are not all known, or it was another process's."""
        oldest = self._batches[0].seq if self._batches else self._seq + 1
        if not oldest - 1 <= seq <= self._seq:
            raise JournalGap(f"batch {seq} is not among those that can be continued, {oldest - 1} … {self._seq}")
        return list(islice(self._batches, seq - oldest + 1, None))

    def snapshot(self) -> tuple[int, list[Block]]:
        """The number of the last batch and all blocks after it, parents before children."""
        return self._seq, list(self._blocks.values())


def _num_keys(batch: Batch) -> int:
    """What a batch weighs."""
    keys = 1
    for change in batch.changes:
        keys += len(change.blocks) if isinstance(change, Stored) else len(getattr(change, "keys", ()))
    return keys
