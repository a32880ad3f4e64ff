"""What the index says of a prompt's blocks, as far as it speaks of the processes that are alive now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.index import PrefixIndex
from router.tier_depths import lower_blocks


@dataclass(frozen=True, slots=True)
class Depths:
    """By worker id: leading blocks of a prompt on the device, and by tier those that follow them below it."""

    on_device: Mapping[str, int] = field(default_factory=dict)
    lower: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class LiveIndex:
    """An index may still have what the process before said under a worker's id: that does not count.

    Without an `index` nobody holds anything.
    """

    def __init__(self, index: PrefixIndex | None) -> None:
        self._index = index

    def depths(self, chain: Sequence[bytes], incarnations: Mapping[str, int]) -> Depths:
        """`chain` has the prompt's index keys, `incarnations` the workers that are asked about."""
        if self._index is None:
            return Depths()
        records = self._index.workers()
        known = [
            worker_id
            for worker_id, incarnation in incarnations.items()
            if worker_id in records and records[worker_id].incarnation == incarnation
        ]
        on_device = self._index.lookup(chain, known)
        return Depths(on_device, lower_blocks(on_device, self._index.lookup_lower(chain, known)))
