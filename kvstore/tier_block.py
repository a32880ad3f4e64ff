"""A block below the device: what it is, and where and in what state it lies in a tier."""

import hashlib
from dataclasses import dataclass, field

OWNER_BYTES = 16
NO_OWNER = bytes(OWNER_BYTES)
_PART_BYTES = OWNER_BYTES // 2


def owner_of(cache_salt: str, adapter: str = "") -> bytes:
    """Whose a block is, 16 bytes: half of them name the tenant by its salt, half the adapter, zeros for none.

    So neither the salt nor the adapter's name need lie on a disk.
    """
    return _part(b"pw-own-1", cache_salt) + _part(b"pw-own-2", adapter)


@dataclass(frozen=True, slots=True)
class Owned:
    """Everything of one tenant, or of one adapter: a half of `owner_of`."""

    part: bytes
    at: int

    @classmethod
    def by_tenant(cls, cache_salt: str) -> "Owned":
        """With any adapter; an empty salt: everything without one."""
        return cls(_part(b"pw-own-1", cache_salt), 0)

    @classmethod
    def by_adapter(cls, name: str) -> "Owned":
        """All its loads, of any tenant."""
        return cls(_part(b"pw-own-2", name), _PART_BYTES)

    def has(self, owner: bytes) -> bool:
        return owner[self.at : self.at + _PART_BYTES] == self.part


def _part(tag: bytes, name: str) -> bytes:
    return hashlib.sha256(tag + name.encode()).digest()[:_PART_BYTES] if name else bytes(_PART_BYTES)


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
