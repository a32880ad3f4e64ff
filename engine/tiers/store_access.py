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


class TooSlow(StoreError):
    """It did not answer in the time that a load had, which says nothing about whether it works."""


class StoreAccess:
    """Used on the store's event loop; `is_away`, `is_slow` and the counts from any thread."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.num_failed = 0
        self.num_late = 0
        self._outage = _Pause()
        self._slowness = _Pause()
        self._logged_at = float("-inf")

    @property
    def is_away(self) -> bool:
        """It failed a moment ago: better not ask."""
        return self._outage.is_on

    @property
    def is_slow(self) -> bool:
        """A load took too long a moment ago: better compute. Writing has more time and goes on."""
        return self._slowness.is_on

    async def ask(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """What `work` (of the store) returns. Raises StoreError, at the latest after `seconds`."""
        try:
            return await self.ask_for_load(work, seconds)
        except TooSlow as error:
            self._note_failure(str(error))
            raise

    async def ask_for_load(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """As `ask`, but a store that needs longer (TooSlow) has not failed."""
        try:
            return await within(max(0.0, seconds), work)
        except TimeoutError:
            raise TooSlow(f"{self.store} did not answer in {seconds:.3f} s") from None
        except StoreError as error:
            self._note_failure(str(error))
            raise

    def note_put(self) -> None:
        """Something was stored: it works."""
        self._outage.reset()

    def note_load(self) -> None:
        """A load got all that it wanted: it works, and in time."""
        self._outage.reset()
        self._slowness.reset()

    def note_late(self) -> None:
        """A load got less than it wanted in more time than it should have taken."""
        self.num_late += 1
        self._slowness.begin()

    def _note_failure(self, message: str) -> None:
        self.num_failed += 1
        self._outage.begin()
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_SECONDS:
            self._logged_at = now
            logger.error("tier store: %s (%d failures so far); blocks are computed instead", message, self.num_failed)


class _Pause:
    """Each is twice as long as the one before, until `reset`."""

    def __init__(self) -> None:
        self._seconds = _PAUSE_SECONDS
        self._until = float("-inf")

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self._until

    def begin(self) -> None:
        """Nothing, while one is on."""
        if not self.is_on:
            self._until = time.monotonic() + self._seconds
            self._seconds = min(2 * self._seconds, _MAX_PAUSE_SECONDS)

    def reset(self) -> None:
        """The next one is short again."""
        self._seconds = _PAUSE_SECONDS
