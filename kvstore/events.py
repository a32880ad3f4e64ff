"""What changed in a worker's cache: the events that feed the prefix index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["stored", "removed", "cleared"]
Tier = Literal["device", "host", "disk"]
LOWER_TIERS: tuple[Tier, ...] = ("host", "disk")
"""Those below the device, from fast to slow."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """`keys` (32 bytes each) were stored or removed, in this order; `cleared`: the tier holds nothing any more."""

    kind: EventKind
    keys: tuple[bytes, ...] = ()
    tier: Tier = "device"


def in_runs(changes: Sequence[tuple[EventKind, bytes]], tier: Tier = "device") -> list[CacheEvent]:
    """The changes of one tier in order, runs of the same kind as one event."""
    events: list[CacheEvent] = []
    start = 0
    for end in range(1, len(changes) + 1):
        if end == len(changes) or changes[end][0] != changes[start][0]:
            kind = changes[start][0]
            keys = () if kind == "cleared" else tuple(key for _, key in changes[start:end])
            events.append(CacheEvent(kind, keys, tier))
            start = end
    return events
