"""The prefix index as its users see it: which worker holds how much of a prompt. One Protocol, one promise a method."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from kvstore.events import CacheEvent
from kvstore.registry import WorkerRecord

IndexState = Literal["connected", "disconnected", "off"]


class PrefixIndex(Protocol):
    """A router's view. Every lookup is answered from memory; nothing here waits for a network."""

    @property
    def state(self) -> IndexState:
        """`connected`: the view follows. `disconnected`: it is what was last known. `off`: nothing is followed."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks held, summed over the workers."""
        ...

    def workers(self) -> Mapping[str, WorkerRecord]:
        """Who is registered, by worker id. A worker that deregistered or lost its lease is not in it.

        A record's position is that of the last full read; events since then are in the holdings alone.
        """
        ...

    def lookup(self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None) -> dict[str, int]:
        """For each worker (of `worker_ids`, default all) the number of leading `keys` that its device holds.

        Keys are block keys (32 bytes) or index keys (16 bytes) in prompt order. An unknown worker holds 0. Holdings are
        taken to be prefix-closed (DESIGN §5): whoever has a key has all that come before it.
        """
        ...

    def lookup_lower(
        self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None
    ) -> Mapping[str, dict[str, int]]:
        """The same for each tier below the device ("host", "disk") in which anybody holds anything."""
        ...

    async def start(self) -> None:
        """Begins to follow. Returns at once, also when there is nobody to follow yet."""
        ...

    async def stop(self) -> None:
        """Ends everything that `start` began. Idempotent."""
        ...

    async def quiesce(self, timeout: float = 10.0) -> None:
        """Returns when the view contains everything that was published before the call; TimeoutError otherwise."""
        ...


class IndexPublisher(Protocol):
    """A worker's side: says what the worker holds. It never makes the worker wait."""

    async def start(self) -> None:
        """Begins to register. Returns at once, also when there is nowhere to register yet."""
        ...

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Takes the events, in the order in which they happened. Returns at once; callable from any thread."""
        ...

    async def quiesce(self, timeout: float = 10.0) -> None:
        """Returns when everything taken before the call is published; TimeoutError otherwise."""
        ...

    async def stop(self) -> None:
        """Deregisters if it can, and ends. Idempotent."""
        ...
