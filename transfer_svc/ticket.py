"""A ticket: one request's KV while others may read it, and what is said of it. Pure data."""

from dataclasses import dataclass, field
from enum import Enum

from engine.request import TokenOutput

# A router takes as long as this to believe that a worker is gone, and then watches it anew.
ROUTER_GRACE_SECONDS = 5.0


class TicketState(Enum):
    """Who owns the blocks: the Prefill stream, or the lease. Lent ones are cached: the receiver could compute them."""

    COMPUTING = "computing"
    LEASED = "leased"
    LENT = "lent"


class TicketError(Exception):
    """Base of what the table refuses."""


class UnknownTicket(TicketError):
    """Never made, released, expired, revoked, or its prefill failed."""


class StaleEpoch(TicketError):
    """Somebody attached later."""


@dataclass(frozen=True, slots=True)
class ManifestBlock:
    """One computed block: where it lies, what it is, its checksum. `key` is empty for the partial last block."""

    block_id: int
    generation: int
    checksum: int
    key: bytes


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What the end of a pull says. `ended_at` is when the engine was done."""

    num_tokens: int
    num_cached_tokens: int
    first_tokens: tuple[TokenOutput, ...]
    ended_at: float = 0.0

    @property
    def all_finished(self) -> bool:
        """Every choice ended with its first token: nobody needs the KV."""
        return bool(self.first_tokens) and all(token.finish_reason is not None for token in self.first_tokens)


@dataclass(slots=True)
class Ticket:
    """One request's KV while others may read it, with one reference on each block of `block_ids`.

    `blocks` begin at index `first_block` of the sequence. They are those of KV group 0; `others` are the other groups',
    which begin at `first_blocks` (by group; empty: one group that keeps everything). A lent ticket also holds the
    `leading_ids` before them, since who holds a block of a chain holds all before it, and the `pending_ids` (and
    `pending_others`) whose checksums are still to be computed.

    `holder_left_at`: its holder's connection broke then, and nothing was heard of the holder since. `router_left_at`:
    the same of the router that asked for it.
    """

    name: bytes
    request_id: str
    num_tokens: int
    lease_seconds: float
    state: TicketState = TicketState.COMPUTING
    epoch: int = 0
    holder: str = ""
    num_cached_tokens: int = 0
    blocks: list[ManifestBlock] = field(default_factory=list)
    first_blocks: tuple[int, ...] = ()
    others: list[list[ManifestBlock]] = field(default_factory=list)
    result: PrefillResult | None = None
    expires_at: float = 0.0
    leased_at: float = 0.0
    is_abandoned: bool = False
    holder_left_at: float | None = None
    router_id: str = ""
    router_left_at: float | None = None
    trace_id: str = ""
    leading_ids: tuple[int, ...] = ()
    pending_ids: list[int] = field(default_factory=list)
    pending_others: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.others = [[] for _ in self.first_blocks[1:]]

    @property
    def first_block(self) -> int:
        return self.first_blocks[0] if self.first_blocks else len(self.leading_ids)

    @property
    def num_groups(self) -> int:
        return 1 + len(self.others)

    def of_group(self, group: int) -> tuple[int, list[ManifestBlock]]:
        """The index in the sequence of a KV group's first block, and its blocks so far."""
        return (self.first_blocks[group], self.others[group - 1]) if group else (self.first_block, self.blocks)

    @property
    def num_blocks(self) -> int:
        """In all groups."""
        num_others = sum(map(len, self.others)) + sum(map(len, self.pending_others))
        return len(self.leading_ids) + len(self.blocks) + len(self.pending_ids) + num_others

    @property
    def block_ids(self) -> list[int]:
        """In all groups, those before `first_block` too."""
        own = [*self.leading_ids, *(block.block_id for block in self.blocks), *self.pending_ids]
        others = [block.block_id for blocks in self.others for block in blocks]
        return [*others, *(block_id for block_ids in self.pending_others for block_id in block_ids), *own]

    @property
    def orphaned_at(self) -> float | None:
        """When nobody will want it: its router is gone, and no decode worker took it or that one missed two beats."""
        if self.router_left_at is None:
            return None
        at = self.router_left_at + ROUTER_GRACE_SECONDS
        return max(at, self.expires_at - self.lease_seconds / 3) if self.epoch else at
