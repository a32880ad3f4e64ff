"""Blocks that a step may still read and write after their sequence has given them up. Pure."""

from collections.abc import Sequence

from engine.kv_cache import KvCache


class LateReleases:
    """Releases blocks, but later while a step runs that was started ahead (`engine/decode_pipeline.py`).

    Somebody else, a transfer, would fill them meanwhile.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._held_back: list[int] = []
        self.holds_back = False

    def hold_back(self) -> None:
        """A step is started while another one runs: what is given up from now on stays taken until `landed`."""
        self.holds_back = True

    def landed(self, *, going_on: bool) -> None:
        """A step has ended: what was held back is free now. `going_on`: another one runs that was started ahead."""
        self.holds_back = going_on
        held_back, self._held_back = self._held_back, []
        self._cache.release(held_back)

    def release(self, block_ids: Sequence[int]) -> int:
        """As `KvCache.release`; 0 blocks get free while they are held back."""
        if not self.holds_back:
            return self._cache.release(block_ids)
        self._held_back[:0] = block_ids  # `KvCache.release` begins with the last ones, which were given up first
        return 0

    def release_with(self, block_id: int) -> None:
        """The block stays taken as long as what is held back, whatever becomes of the reference on it."""
        if self.holds_back:
            self._cache.acquire([block_id])
            self.release([block_id])
