"""Names and encodings in Redis (DESIGN §8): key names with the cluster hash tag, the fields of an event, key blobs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from kvstore.events import Tier

MODELS = "pw:models"
INDEX_KEY_BYTES = 16

EventKind = Literal["registered", "changed", "deregistered"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """Names below one model's root. The braces make all of them live in one cluster slot."""

    root: bytes

    @property
    def prefix(self) -> str:
        return f"pw:{{{self.root[:16].hex()}}}:"

    @property
    def workers(self) -> str:
        """SET of worker ids: who to ask for; whoever has no lease any more is gone."""
        return f"{self.prefix}workers"

    @property
    def events(self) -> str:
        """STREAM of every change of every worker's holdings."""
        return f"{self.prefix}events"

    def worker(self, worker_id: str) -> str:
        """HASH with the worker's record; it expires with the worker's lease."""
        return f"{self.prefix}worker:{worker_id}"

    @property
    def blocks_prefix(self) -> str:
        return f"{self.prefix}blocks:"

    def blocks(self, worker_id: str, incarnation: int, tier: Tier = "device") -> str:
        """SET of the 16-byte keys of the blocks the worker holds there."""
        name = f"{self.blocks_prefix}{worker_id}:{incarnation}"
        return name if tier == "device" else f"{name}:{tier}"


def index_keys(keys: Iterable[bytes]) -> list[bytes]:
    """The 16 bytes of each key that the index carries."""
    return [key[:INDEX_KEY_BYTES] for key in keys]


def split_keys(blob: bytes) -> tuple[bytes, ...]:
    """Cuts concatenated index keys apart; ValueError if a part is left over."""
    if len(blob) == INDEX_KEY_BYTES:
        return (blob,)
    if len(blob) % INDEX_KEY_BYTES:
        raise ValueError(f"{len(blob)} bytes are no whole number of {INDEX_KEY_BYTES}-byte keys")
    return tuple([blob[i : i + INDEX_KEY_BYTES] for i in range(0, len(blob), INDEX_KEY_BYTES)])


_REPLACED = [b"worker", b"incarnation", b"generation", b"seq", b"group", b"tier", b"removed", b"stored"]


@lru_cache(1024)
def _origin(
    worker: bytes, incarnation: bytes, generation: bytes, group: bytes, tier: bytes
) -> tuple[str, int, int, int, str]:
    """What all events of a worker's life have in common, read once."""
    return worker.decode(), int(incarnation), int(generation), int(group), tier.decode()


class BlockEvent(NamedTuple):
    """One entry of the event stream, complete in itself: who, in which life, the how-manieth, and what changed.

    Applied in the order: cleared, removed, stored. `group` is the KV group id, `tier` where the blocks lie;
    "registered" and "deregistered" are of all tiers. (A tuple: a router reads many thousands a second.)
    """

    worker_id: str
    incarnation: int
    generation: int
    seq: int
    kind: EventKind = "changed"
    cleared: bool = False
    removed: tuple[bytes, ...] = ()
    stored: tuple[bytes, ...] = ()
    group: int = 0
    tier: str = "device"

    @property
    def position(self) -> tuple[int, int, int]:
        """As `WorkerRecord.position`, after this event."""
        return self.incarnation, self.generation, self.seq

    def to_fields(self) -> dict[str, str | bytes]:
        """The event as stream fields."""
        fields: dict[str, str | bytes] = {
            "worker": self.worker_id,
            "incarnation": str(self.incarnation),
            "generation": str(self.generation),
            "seq": str(self.seq),
            "group": str(self.group),
            "tier": self.tier,
        }
        if self.kind != "changed":
            fields[self.kind] = "1"
        if self.cleared:
            fields["cleared"] = "1"
        if self.removed:
            fields["removed"] = b"".join(self.removed)
        if self.stored:
            fields["stored"] = b"".join(self.stored)
        return fields

    @classmethod
    def from_pairs(cls, pairs: list[bytes]) -> "BlockEvent":
        """Reads `to_fields` as the stream has it, names and values in turn; ValueError if the entry is not an event.

        In half the time of `from_fields` if it is what a full worker writes: so many stored, so many removed.
        """
        if len(pairs) == 2 * len(_REPLACED) and pairs[::2] == _REPLACED:
            worker, incarnation, generation, seq, group, tier, removed, stored = pairs[1::2]
            worker_id, life, reading, group_id, where = _origin(worker, incarnation, generation, group, tier)
            keys = split_keys(removed), split_keys(stored)
            return tuple.__new__(cls, (worker_id, life, reading, int(seq), "changed", False, *keys, group_id, where))
        return cls.from_fields(dict(zip(pairs[::2], pairs[1::2], strict=True)))

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> "BlockEvent":
        """The same, in any order."""
        kind: EventKind = "changed"
        if b"registered" in fields:
            kind = "registered"
        elif b"deregistered" in fields:
            kind = "deregistered"
        removed, stored = fields.get(b"removed"), fields.get(b"stored")
        try:
            return cls(
                fields[b"worker"].decode(),
                int(fields[b"incarnation"]),
                int(fields[b"generation"]),
                int(fields[b"seq"]),
                kind,
                b"cleared" in fields,
                split_keys(removed) if removed else (),
                split_keys(stored) if stored else (),
                int(fields[b"group"]),
                fields[b"tier"].decode(),
            )
        except KeyError as error:
            raise ValueError(f"an index event lacks the field {error}") from error
