"""A block below the device: what it is, and where and in what state it lies in a tier."""

import hashlib
from dataclasses import dataclass, field

OWNER_BYTES = 16
NO_OWNER = bytes(OWNER_BYTES)


def owner_of(cache_salt: str) -> bytes:
    """Names a tenant by its salt, 16 bytes, so that the salt itself need not lie on a disk."""
    return hashlib.sha256(b"pw-own-1" + cache_salt.encode()).digest()[:OWNER_BYTES] if cache_salt else NO_OWNER


@dataclass(frozen=True, slots=True)
class TierBlock:
    """A full block of a KV group: what tiers call it (32 bytes, `TierChain.name`: its key, in group 0), the block that
    it hangs on (None: a chain's first), its tokens, whose it is."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    owner: bytes = NO_OWNER
    group: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """A block in a slot, number `depth` of its chain; callers read it and change it only through the book.

    `checksum` counts once it is ready. `stamp`, `age`, `cost` and `position` say when it is evicted
    (`EvictionOrder`). `heirs` are the children by which the chain goes on: no window's.
    """

    block: TierBlock
    slot: int
    depth: int = 0
    checksum: int = 0
    is_ready: bool = False
    num_readers: int = 0
    pinned_until: float = 0.0
    stamp: int = 0
    age: float = 0.0
    num_uses: int = 0
    cost: float = 0.0
    is_gone: bool = False
    position: int = -1
    children: set[bytes] = field(default_factory=set)
    heirs: set[bytes] = field(default_factory=set)
