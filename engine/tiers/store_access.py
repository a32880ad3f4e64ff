"""The one way to a shared store: every question has a time, and a store that fails is left alone for a while."""

import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvstore.background import within
from kvstore.block_store import BlockStore, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 30.0
_LOG_EVERY_SECONDS = 60.0


class StoreAccess:
    """Used on the store's event loop; `is_away` and `num_failed` from any thread."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.num_failed = 0
        self._pause = _PAUSE_SECONDS
        self._away_until = float("-inf")
        self._logged_at = float("-inf")

    @property
    def is_away(self) -> bool:
        """It failed a moment ago: better not ask."""
        return time.monotonic() < self._away_until

    async def ask(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """What `work` (of the store) returns. Raises StoreError, at the latest after `seconds`."""
        try:
            answer = await within(max(0.0, seconds), work)
        except TimeoutError:
            self._note_failure(f"{self.store} did not answer in {seconds:.3f} s")
            raise StoreError(f"{self.store} did not answer in {seconds:.3f} s") from None
        except StoreError as error:
            self._note_failure(str(error))
            raise
        self._pause = _PAUSE_SECONDS
        return answer

    def _note_failure(self, message: str) -> None:
        self.num_failed += 1
        now = time.monotonic()
        if now >= self._away_until:
            self._away_until = now + self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
        if now - self._logged_at >= _LOG_EVERY_SECONDS:
            self._logged_at = now
            logger.error("tier store: %s (%d failures so far); blocks are computed instead", message, self.num_failed)
