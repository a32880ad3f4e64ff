"""What a worker tells others about itself, as plain data, and the protocol by which the shared servicers ask for it."""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

WorkerRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerFingerprint:
    """What two workers must agree on before KV may travel (`fits`); the plain form of Fingerprint."""

    root: bytes
    layout_id: str
    numerics_class: str
    block_size: int
    block_bytes: tuple[int, ...]

    def fits(self, other: "WorkerFingerprint") -> bool:
        """Whether one may decode on KV that the other has prefilled: they are equal but for the number of ranks.

        A block has all kv heads in the same order on any number. Its values differ in their last bits: what one has
        cached counts as another class's.
        """
        if self == other:
            return True
        return self.root == other.root and _with_one_rank(self) == _with_one_rank(other)

    def __str__(self) -> str:
        return (
            f"root={self.root.hex()[:16]} layout={self.layout_id} numerics={self.numerics_class} "
            f"block_size={self.block_size} block_bytes={','.join(map(str, self.block_bytes))}"
        )


def _with_one_rank(fingerprint: WorkerFingerprint) -> WorkerFingerprint:
    return replace(fingerprint, numerics_class=re.sub(r"/tp\d+$", "/tp1", fingerprint.numerics_class))


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Fixed for the life of an incarnation; the plain form of WorkerInfo."""

    worker_id: str
    incarnation: int
    role: WorkerRole
    endpoint: str
    model: str
    fingerprint: WorkerFingerprint
    max_model_len: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AdapterLabel:
    """One load of an adapter; the plain form of AdapterRef."""

    name: str
    digest: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter as a worker has it; the plain form of Adapter. `retired`: not for new requests."""

    label: AdapterLabel
    rank: int
    path: str
    num_bytes: int
    resident: bool
    retired: bool = False


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that is said to hold `num_blocks` leading blocks of a prompt, the last `num_lower_blocks` of them below
    its device; the plain form of the message."""

    endpoint: str
    worker_id: str
    incarnation: int
    num_blocks: int
    role: WorkerRole
    num_lower_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The plain form of WorkerLoad, and the adapters that come beside it."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_free_blocks: int = 0
    num_held_blocks: int = 0
    draining: bool = False
    num_transfers: int = 0
    adapters: tuple[AdapterView, ...] = ()

    def plus(self, num_tokens: int, num_sequences: int) -> "LoadSnapshot":
        """With work that it does not contain yet. Not by `replace`, which takes four times as long."""
        return LoadSnapshot(
            self.num_running,
            self.num_waiting + num_sequences,
            self.num_queued_tokens + num_tokens,
            self.num_free_blocks,
            self.num_held_blocks,
            self.draining,
            self.num_transfers,
            self.adapters,
        )


@dataclass(frozen=True, slots=True)
class TicketSnapshot:
    """The plain form of TicketStatus."""

    ticket_prefix: str
    state: str
    epoch: int
    lease_ms: int
    num_blocks: int
    request_id: str = ""
    holder: str = ""
    holder_left: bool = False


@dataclass(frozen=True, slots=True)
class TenantQueueSnapshot:
    """The plain form of TenantQueue."""

    tenant: str
    num_requests: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """What only operators ask for."""

    num_cached_blocks: int
    num_referenced_blocks: int
    num_requests: int
    tickets: tuple[TicketSnapshot, ...] = ()
    queues: tuple[TenantQueueSnapshot, ...] = ()


class WorkerView(Protocol):
    """A worker as the shared servicers see it. All methods run on the event loop."""

    @property
    def description(self) -> WorkerDescription: ...

    def load(self) -> LoadSnapshot: ...

    def status(self) -> StatusSnapshot: ...

    async def wait_for_change(self) -> None:
        """Returns when `load()` may have changed."""
        ...

    def router_presence(self, router_id: str) -> AbstractContextManager[None]:
        """Stands while a router watches this worker."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix that nothing uses; returns how many blocks."""
        ...

    async def load_adapter(
        self, name: str, path: str, generation: int, *, check_only: bool, digest: bytes
    ) -> AdapterView:
        """Reads an adapter and makes it known (`check_only`: doesn't). Raises PagewireError if it can't be served,
        or if `digest` is given and is not its content's."""
        ...

    def unload_adapter(self, name: str, generation: int) -> bool:
        """New requests no longer find it; with a `generation` that load is taken back. Whether it was here.

        Raises NotFound without one."""
        ...

    def start_drain(self) -> None:
        """No new work from now on; what runs is finished. Idempotent."""
        ...

    def cached_keys(self) -> tuple[list[bytes], int]:
        """Index keys of all cached blocks, and the sequence number of the last event they include."""
        ...
