"""An index of workers that have tiers."""

from collections.abc import Mapping, Sequence

from kvstore.memory_index import MemoryIndex


class TieredIndex(MemoryIndex):
    """`lower` is for a test to set: leading blocks by tier and worker id."""

    def __init__(self) -> None:
        super().__init__()
        self.lower: dict[str, dict[str, int]] = {}

    def lookup_lower(
        self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None
    ) -> Mapping[str, dict[str, int]]:
        return {tier: {each: depths.get(each, 0) for each in worker_ids or ()} for tier, depths in self.lower.items()}
