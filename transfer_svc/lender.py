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
from kvstore.kv_groups import HeldBlocks
from pagewire.errors import NotFound, ResourceExhausted
from pagewire.fetch_metrics import FetchMetrics
from transfer_svc.leases import LeaseTable
from transfer_svc.manifest import describe_blocks
from transfer_svc.sender import MAX_BLOCKS_PER_RUN, KvSender
from transfer_svc.ticket import Ticket, TicketError

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

    async def lend(
        self, holder: str, keys: Sequence[bytes], token_ids: Sequence[int], first_block: int, *, always: bool = False
    ) -> Ticket:
        """A ticket over the leading blocks of the chain that this worker has, more than `first_block` of them.

        `always`: also those that a tier has and that are dearer to load than to compute. Raises NotFound or
        ResourceExhausted; then nothing is held, nor when it is cancelled.
        """
        most = self._cache.groups.deepest_hit(self._most_blocks(), len(keys))
        if most <= first_block:
            raise self._refused()
        held, num_full = self._cache.match_groups(keys[:most], token_ids), self._cache.groups.num_full
        try:
            if held[0].end < first_block and self._host.engine.tiers is not None:
                for group in range(num_full):  # what the device has of them the borrower has too
                    self._cache.release(held[group].block_ids)
                    held[group] = HeldBlocks(first_block, ())
            has_waited, held = await self._load(keys[:most], token_ids, held, always)
            own, num_held = held[0], sum(len(blocks.block_ids) for blocks in held)
            if own.end <= first_block:
                raise NotFound(f"not more than {own.end} leading blocks can be had here", reason="PREFIX_GONE")
            # What was taken is not free any more, and others may have been lent blocks meanwhile.
            if self._num_lacking() > 0 or (has_waited and num_held > self._most_blocks()):
                raise self._refused()
        except BaseException:
            self._release(held)
            self._host.announce()
            raise
        firsts = [max(first_block, blocks.first) for blocks in held[:num_full]]
        firsts += [blocks.first for blocks in held[num_full:]]
        ticket = self._leases.lend(
            holder,
            own.block_ids,
            firsts[0] - own.first,
            own.end * self._cache.block_size,
            self._lease_seconds,
            self._clock(),
            firsts if self._cache.groups.slides or own.first else (),
            [blocks.block_ids for blocks in held[1:]],
        )
        task = asyncio.create_task(self._describe(ticket.name, held, keys, firsts), name="lend-checksums")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._metrics.lent_blocks.inc(sum(blocks.end - first for blocks, first in zip(held, firsts, strict=True)))
        self._observe()
        return ticket

    async def _load(
        self, keys: Sequence[bytes], token_ids: Sequence[int], held: list[HeldBlocks], always: bool
    ) -> tuple[bool, list[HeldBlocks]]:
        """Brings what only a tier has behind `held`, if cheaper than computing it here, or `always`.

        Returns whether it has waited for anything, and what is held then: one reference on each is the caller's as
        before. The blocks are not cached: they are there for the borrower, and free again when the ticket ends.
        """
        groups = self._cache.groups
        tiers, room = self._host.engine.tiers, min(groups.num_hit_blocks(len(keys)), self._num_spare())
        if tiers is None or room < 1:
            return False, held
        starts = [blocks.end for blocks in held[: groups.num_full]]
        load = tiers.start_load(keys, token_ids, starts, max_blocks=room, always=always)
        if load is None:
            return False, held
        num_blocks = len(load.block_ids)
        self._num_loading += num_blocks
        try:
            await asyncio.shield(asyncio.wrap_future(load.done))
        except asyncio.CancelledError:
            load.abandon()
            raise
        finally:
            self._num_loading -= num_blocks
        more = load.tables(starts[0] + load.num_loaded if groups.is_plain else load.depth, starts)
        if more is None:  # a part of what a hit needs is nobody's hit
            load.give_back()
            return True, held
        for name in SOURCE_NAMES:
            self._metrics.lent_from(name, load.num_blocks_of(name))
        kept = held[: groups.num_full]
        for blocks in held[groups.num_full :]:
            self._cache.release(blocks.block_ids)
        full = [
            HeldBlocks(before.first, (*before.block_ids, *after.block_ids))
            for before, after in zip(kept, more, strict=False)
        ]
        return True, [*full, *more[groups.num_full :]]

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
        num_lent = sum(ticket.num_blocks for ticket in lent) + self._num_loading
        return int(self._cache.num_blocks * self._limits.max_share) - num_lent

    def _observe(self) -> None:
        self._metrics.num_lent_tickets.set(len(self._leases.lent))

    def _release(self, held: Sequence[HeldBlocks]) -> None:
        for blocks in reversed(held):
            self._cache.release(blocks.block_ids)

    async def _describe(
        self, name: bytes, held: Sequence[HeldBlocks], keys: Sequence[bytes], firsts: Sequence[int]
    ) -> None:
        """Group by group, from number `firsts` of each on."""
        for group, (blocks, first) in enumerate(zip(held, firsts, strict=True)):
            for start in range(first, blocks.end, MAX_BLOCKS_PER_RUN):
                stop = min(start + MAX_BLOCKS_PER_RUN, blocks.end)
                block_ids = blocks.block_ids[start - blocks.first : stop - blocks.first]
                manifest = await self._host.in_thread(describe_blocks, self._host.memory, block_ids, keys[start:stop])
                try:
                    self._leases.extend(name, manifest, group)
                except TicketError:
                    return  # released, expired or revoked meanwhile: the checksums are for nobody
                self._sender.wake(name)
