"""Which blocks of a prompt lie below each worker's device, and in which tier. Pure."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.events import LOWER_TIERS

G = TypeVar("G", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Leading blocks that some worker has on its device, and those that follow them below one, by tier."""

    on_device: int = 0
    lower: Mapping[str, int] = field(default_factory=dict)


NOTHING = Holdings()


def lower_blocks(on_device: Mapping[str, int], depths: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """For each worker the blocks that follow those of its device, by the fastest tier that has them.

    `on_device` and, by tier from fast to slow, `depths` are leading blocks by worker id. A worker that has nothing
    more below its device is not in the result.

        device  |####|          4 blocks
        host    |##|
        disk    |########|      -> {"disk": 4}
    """
    found: dict[str, dict[str, int]] = {}
    reached = dict(on_device)
    for tier, of_tier in depths.items():
        for worker_id, depth in of_tier.items():
            more = depth - reached.get(worker_id, 0)
            if more > 0:
                found.setdefault(worker_id, {})[tier] = more
                reached[worker_id] = depth
    return found


def best_holdings(
    on_device: Mapping[str, int], lower: Mapping[str, Mapping[str, int]], groups: Mapping[str, G]
) -> dict[G, Holdings]:
    """What can be had of the workers of each group taken together; `lower` as `lower_blocks` returns it."""
    tops: dict[G, int] = {}
    depths: dict[G, dict[str, int]] = {}
    for worker_id, group in groups.items():
        depth = on_device.get(worker_id, 0)
        tops[group] = max(depth, tops.get(group, 0))
        for tier, more in lower.get(worker_id, {}).items():
            depth += more
            of_group = depths.setdefault(group, {})
            of_group[tier] = max(depth, of_group.get(tier, 0))
    found = {}
    for group, top in tops.items():
        by_tier: dict[str, dict[str, int]] = {tier: {"": depths.get(group, {}).get(tier, 0)} for tier in LOWER_TIERS}
        found[group] = Holdings(top, lower_blocks({"": top}, by_tier).get("", {}))
    return found
