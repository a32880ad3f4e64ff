"""Who gets the next free block when several transfers fill the pool: the oldest, and the youngest gives way.

Transfers take blocks one by one as theirs become ready. Without an order two of them could each hold half of what they
need and wait for the other for ever. So: nobody takes a block while an older transfer waits for one, and when an older
one finds none, the youngest that holds blocks gives all of them back and starts over later. A block for each running
sequence is left alone: it is better to wait than to preempt what decodes. "Older" is by arrival for the transfers of
one tenant; between tenants it is their fair order, so that a flood of one does not hold up the others.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from engine.fair_order import FairOrder
from engine.kv_cache import KvCache

_LONGEST_WAIT = 0.1
_LAST = sys.maxsize  # in rank: behind every tenant's turn


class Preempted(Exception):
    """An older transfer needs the blocks: give them back, wait for your turn, start over."""


class PoolFull(Exception):
    """No block became free in time."""


class Reservation:
    """One transfer's place: the tenants' fair order, then arrival. `num_blocks` is what it holds now.

    `timeout` is the longest it waits for a block.
    """

    def __init__(self, rank: tuple[int, int], timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.num_blocks = 0
        self.is_preempted = False
        self.is_waiting = False
        self._scope: asyncio.Timeout | None = None

    @asynccontextmanager
    async def preemptible(self) -> AsyncIterator[None]:
        """Raises Preempted out of whatever the body awaits when an older transfer needs the blocks."""
        if self.is_preempted:
            raise Preempted
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if not self.is_preempted:
                raise
            raise Preempted from None
        finally:
            self._scope = None

    def preempt(self) -> None:
        """Interrupts the holder at its next await."""
        self.is_preempted = True
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())


class Reservations:
    """All transfers that fill blocks. One event loop owns it.

    `wait_for_change` returns when blocks may be free; `num_growing` says how many the sequences that decode may take.
    """

    def __init__(
        self,
        kv_cache: KvCache,
        wait_for_change: Callable[[], Awaitable[None]],
        num_growing: Callable[[], int],
        timeout: float,
    ) -> None:
        self._kv_cache = kv_cache
        self._num_growing = num_growing
        self._wait_for_change = wait_for_change
        self._timeout = timeout
        self._open: list[Reservation] = []
        self._num_opened = 0
        self._fair_order = FairOrder()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, tenant: str = "", num_tokens: int = 0, timeout: float | None = None) -> Reservation:
        """A place behind everybody of the same tenant; the caller ends with `close`.

        `timeout` 0 never waits, takes blocks from nobody and gives its own to everybody who does.
        """
        self._num_opened += 1
        tag = _LAST if timeout == 0 else self._fair_order.tag(0, tenant, num_tokens)
        reservation = Reservation((tag, self._num_opened), self._timeout if timeout is None else timeout)
        self._open.append(reservation)
        return reservation

    def close(self, reservation: Reservation) -> None:
        """The transfer is over."""
        self._open.remove(reservation)
        if not self._open:
            self._fair_order.reset()

    async def allocate(self, mine: Reservation, most: int) -> list[int]:
        """1 … `most` blocks, one reference on each; PoolFull after the timeout. Await it in `mine.preemptible()`."""
        await self.wait_for_room(mine)
        while not (block_ids := self._kv_cache.allocate(max(1, min(most, self._num_available)))):
            await self.wait_for_room(mine)
        mine.num_blocks += len(block_ids)
        if mine.rank[0] != _LAST:
            self._fair_order.started(0, mine.rank[0])
        return block_ids

    @property
    def _num_available(self) -> int:
        return self._kv_cache.num_free - self._num_growing()

    @property
    def num_spare(self) -> int:
        """Blocks that may be taken without a reservation: none while a transfer waits for one."""
        return 0 if self.is_short else max(0, self._num_available)

    @property
    def is_short(self) -> bool:
        """True if a transfer waits for a block."""
        return any(each.is_waiting for each in self._open)

    def has_room(self, mine: Reservation) -> bool:
        """True if `allocate` would not wait."""
        return self._num_available > 0 and not self._is_older_waiting(mine)

    async def wait_for_room(self, mine: Reservation) -> None:
        """Returns when `mine` may take a block; the youngest transfer gives its blocks back if there is none."""
        deadline = asyncio.get_running_loop().time() + mine.timeout
        mine.is_waiting = True
        try:
            while not self.has_room(mine):
                if mine.timeout > 0:
                    self._preempt_youngest(mine)
                await self._wait(deadline)
        finally:
            mine.is_waiting = False

    async def wait_for_turn(self, mine: Reservation) -> None:
        """After Preempted, blocks given back: returns when no older transfer waits any more; raises PoolFull."""
        deadline = asyncio.get_running_loop().time() + mine.timeout
        mine.num_blocks, mine.is_preempted = 0, False
        while not self.has_room(mine):
            await self._wait(deadline)

    def _is_older_waiting(self, mine: Reservation) -> bool:
        return any(other.is_waiting and other.rank < mine.rank for other in self._open)

    def _preempt_youngest(self, mine: Reservation) -> None:
        younger = [other for other in self._open if other.rank > mine.rank and other.num_blocks]
        if younger and not any(other.is_preempted for other in younger):
            max(younger, key=lambda other: other.rank).preempt()

    async def _wait(self, deadline: float) -> None:
        """Until something changes; looks again by itself now and then, since blocks are freed on other threads too."""
        now = asyncio.get_running_loop().time()
        if now >= deadline:
            raise PoolFull("no block became free in time")
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(deadline, now + _LONGEST_WAIT)):
                await self._wait_for_change()
