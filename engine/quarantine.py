"""Blocks that a given-up read may still write into: held until it is over, then free again."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine.kv_cache import KvCache
from engine.transfer.landing import Landing

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class Quarantine:
    """Lives on one event loop. `announce` is called when blocks have become free."""

    def __init__(self, kv_cache: KvCache, announce: Callable[[], None]) -> None:
        self._kv_cache = kv_cache
        self._announce = announce
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_unsure = False
        self.num_blocks = 0

    def release(self, block_ids: Sequence[int], landing: Landing) -> None:
        """Gives the caller's references back, now or once nothing can land in the blocks any more."""
        if self._is_over(landing):
            self._kv_cache.release(block_ids)
            return
        self.num_blocks += len(block_ids)
        logger.warning("%d blocks are held until a read that was given up is over", len(block_ids))
        task = asyncio.get_running_loop().create_task(self._wait(block_ids, landing), name="quarantine")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Lets go of everything, when nothing can be written any more: the planes are closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self, block_ids: Sequence[int], landing: Landing) -> None:
        try:
            while not self._is_over(landing):  # noqa: ASYNC110 (NIXL has nothing to wait for)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._kv_cache.release(block_ids)
            self.num_blocks -= len(block_ids)
            self._announce()

    def _is_over(self, landing: Landing) -> bool:
        """A plane that cannot say leaves the blocks held: bytes may still come."""
        try:
            return landing.is_over
        except Exception:
            if not self._is_unsure:
                logger.exception("it is not known whether a read that was given up is over: its blocks stay held")
            self._is_unsure = True
            return False
