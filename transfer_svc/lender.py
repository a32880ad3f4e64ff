"""Lends cached blocks to workers that would have to compute them. Whoever borrows can do without at any time.

lend        references on what the device has of the chain; what only host memory or the disk has is loaded behind it,
            verified, into blocks that are nobody else's; a ticket in the lease table, checksums in the background
relieve     own requests lack blocks: tickets are revoked, the newest first, until they do no more
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.host import EngineHost
from engine.tiers.load import SOURCE_NAMES
from pagewire.errors import NotFound, ResourceExhausted
from pagewire.fetch_metrics import FetchMetrics
from transfer_svc.leases import LeaseTable, Ticket, TicketError
from transfer_svc.manifest import describe_blocks
from transfer_svc.sender import MAX_BLOCKS_PER_RUN, KvSender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LendLimits:
    """What a worker lends at most, and for how long after the last heartbeat."""

    max_tickets: int = 64
    max_share: float = 0.5  # of the pool's blocks
    lease_seconds: float = 10.0


class Lender:
    """Lives on the worker's event loop. `num_lacking` says how many blocks the worker's own requests lack now, and
    `num_spare` how many may be taken without holding up anybody."""

    def __init__(
        self,
        host: EngineHost[Any],
        leases: LeaseTable,
        sender: KvSender,
        clock: Callable[[], float],
        num_lacking: Callable[[], int],
        num_spare: Callable[[], int],
        metrics: FetchMetrics,
        limits: LendLimits | None = None,
    ) -> None:
        self._host = host
        self._cache = host.kv_cache
        self._leases = leases
        self._sender = sender
        self._clock = clock
        self._num_lacking = num_lacking
        self._num_spare = num_spare
        self._metrics = metrics
        self._limits = limits or LendLimits()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_loading = 0  # blocks, of lends that wait for a tier
        self.draining = False  # then nothing new is lent; what is lent may be read to its end

    async def stop(self) -> None:
        """Ends the checksums; the tickets are the sender's to drop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def lend(self, holder: str, keys: Sequence[bytes], token_ids: Sequence[int], first_block: int) -> Ticket:
        """A ticket over the leading blocks of the chain that this worker has, more than `first_block` of them.

        Raises NotFound or ResourceExhausted; then nothing is held, nor when it is cancelled.
        """
        most = self._most_blocks()
        if most <= first_block:
            raise self._refused()
        block_ids, begin = self._cache.match(keys[:most], token_ids), 0
        try:
            if len(block_ids) < first_block:  # what the device has the borrower has too
                self._cache.release(block_ids)
                block_ids, begin = [], first_block
            block_ids += await self._load(keys[:most], token_ids, begin + len(block_ids))
            num_blocks = begin + len(block_ids)
            if num_blocks <= first_block:
                raise NotFound(f"not more than {num_blocks} leading blocks can be had here", reason="PREFIX_GONE")
            # What was taken is not free any more, and others may have been lent blocks meanwhile.
            if self._num_lacking() > 0 or len(block_ids) > self._most_blocks():
                raise self._refused()
        except BaseException:
            self._cache.release(block_ids)
            self._host.announce()
            raise
        num_tokens, seconds = num_blocks * self._cache.block_size, self._lease_seconds
        ticket = self._leases.lend(holder, block_ids, first_block, num_tokens, seconds, self._clock(), begin=begin)
        described = self._describe(ticket.name, block_ids[first_block - begin :], keys[first_block:num_blocks])
        task = asyncio.create_task(described, name="lend-checksums")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._metrics.lent_blocks.inc(num_blocks - first_block)
        self._observe()
        return ticket

    async def _load(self, keys: Sequence[bytes], token_ids: Sequence[int], start: int) -> list[int]:
        """Brings what only a tier has from block number `start` on, if that is cheaper than computing it here.

        The blocks are not cached: they are there for the borrower, and free again when the ticket ends.
        """
        tiers, room = self._host.engine.tiers, min(len(keys) - start, self._num_spare())
        if tiers is None or room < 1:
            return []
        load = tiers.start_load(keys, token_ids, start, max_blocks=room)
        if load is None:
            return []
        num_blocks = len(load.block_ids)
        self._num_loading += num_blocks
        try:
            await asyncio.shield(asyncio.wrap_future(load.done))
        except asyncio.CancelledError:
            load.abandon()
            raise
        finally:
            self._num_loading -= num_blocks
        self._cache.release(load.block_ids[load.num_loaded :])
        for name in SOURCE_NAMES:
            self._metrics.lent_from(name, load.num_blocks_of(name))
        return load.block_ids[: load.num_loaded]

    def relieve(self) -> None:
        """Own requests come first: call it whenever they may have come to lack blocks."""
        for ticket in reversed(self._leases.lent):
            if self._num_lacking() <= 0:
                break
            self._metrics.lends_revoked.inc()
            self._sender.drop(ticket.name, "its lender needs the blocks itself")
            logger.info("%s: revoked, own requests need the blocks", ticket.request_id)
        self._observe()

    def _refused(self) -> ResourceExhausted:
        self._metrics.lends_refused.inc()
        return ResourceExhausted("this worker lends no more blocks now", subject="kv_lend")

    @property
    def _lease_seconds(self) -> float:
        return min(self._limits.lease_seconds, self._leases.lease_seconds)

    def _most_blocks(self) -> int:
        lent = self._leases.lent
        if self.draining or len(lent) >= self._limits.max_tickets or self._num_lacking() > 0:
            return 0
        num_lent = sum(ticket.num_held for ticket in lent) + self._num_loading
        return int(self._cache.num_blocks * self._limits.max_share) - num_lent

    def _observe(self) -> None:
        self._metrics.num_lent_tickets.set(len(self._leases.lent))

    async def _describe(self, name: bytes, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        for start in range(0, len(block_ids), MAX_BLOCKS_PER_RUN):
            stop = min(start + MAX_BLOCKS_PER_RUN, len(block_ids))
            manifest = await self._host.in_thread(
                describe_blocks, self._host.memory, block_ids[start:stop], keys[start:stop]
            )
            try:
                self._leases.extend(name, manifest)
            except TicketError:
                return  # released, expired or revoked meanwhile; the checksums of what lay there since are for nobody
            self._sender.wake(name)
