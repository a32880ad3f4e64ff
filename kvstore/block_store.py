"""What a store of KV blocks that a fleet shares has to do, whatever it is made of (`redis_store` is one)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StoreError(Exception):
    """The store did not do what it was asked; the message names it."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block by its 32-byte key, and its number in its chain: what has no beginning is of no use, so ends go first."""

    key: bytes
    depth: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a `put` left: blocks of this fleet in the store now, and how many had to go for it."""

    num_blocks: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class Heads:
    """A piece of a walk over all values: (key, first bytes), and where to go on; 0 is the end."""

    heads: Sequence[tuple[bytes, bytes]]
    next_cursor: int


class BlockStore(Protocol):
    """Values by block key, for the workers of one fingerprint; used on one event loop.

    Every method may raise StoreError and may take for ever: callers give it a time, and go on using it afterwards.
    The store holds at most what it was given room for, and makes room by itself.
    """

    async def touch(self, names: Sequence[BlockName]) -> list[bool]:
        """Which of them are there; those are evicted later for it."""
        ...

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Their values, None for what is not there. Whoever reads them verifies them."""
        ...

    async def put(self, values: Sequence[tuple[BlockName, bytes]]) -> Stored:
        """Each value is there whole afterwards, or not at all. At most `max_batch` of them."""
        ...

    @property
    def max_batch(self) -> int: ...

    async def heads(self, cursor: int, num_bytes: int) -> Heads:
        """The first bytes of values; from cursor 0 until the next is 0 it sees each that was there all the time."""
        ...

    async def delete(self, keys: Sequence[bytes]) -> None: ...

    async def close(self) -> None:
        """Ends in bounded time and raises nothing."""
        ...
