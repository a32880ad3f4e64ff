"""Serves pulls: checks epochs at every step, wakes pulls when a manifest grows or ends, reaps leases."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.kv_cache import KvCache
from pagewire.errors import FailedPrecondition, InvalidArgument, NotFound
from pagewire.trace import log_fields
from pagewire.worker_view import TicketSnapshot
from transfer_svc.leases import Expired, LeaseTable
from transfer_svc.ticket import ManifestBlock, PrefillResult, StaleEpoch, Ticket, TicketState, UnknownTicket

logger = logging.getLogger(__name__)

MAX_BLOCKS_PER_RUN = 64
_MAX_REMEMBERED_ENDS = 1024


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a KV group's manifest; the first has index `first_block` in the sequence."""

    first_block: int
    blocks: tuple[ManifestBlock, ...]
    group: int = 0


class KvSender:
    """The lease table on an event loop. It releases the blocks of every ticket that ends."""

    def __init__(
        self, leases: LeaseTable, kv_cache: KvCache, clock: Callable[[], float], on_change: Callable[[], None]
    ) -> None:
        self._leases = leases
        self._kv_cache = kv_cache
        self._clock = clock
        self._on_change = on_change
        self._changes: dict[bytes, asyncio.Event] = {}
        self._ends: OrderedDict[bytes, str] = OrderedDict()
        self._present: Counter[str] = Counter()
        self._routers: Counter[str] = Counter()

    def attach(self, name: bytes, holder: str) -> Ticket:
        """Starts a new epoch for `holder`; pulls of the older one end. Raises NotFound."""
        try:
            ticket = self._leases.attach(name, holder, self._clock())
        except UnknownTicket:
            raise self._gone(name) from None
        self.wake(name)
        return ticket

    def check(self, name: bytes, epoch: int) -> Ticket:
        """The ticket, if `epoch` still holds it; raises NotFound or FailedPrecondition."""
        try:
            return self._leases.check(name, epoch)
        except UnknownTicket:
            raise self._gone(name) from None
        except StaleEpoch as error:
            raise FailedPrecondition(str(error), reason="STALE_EPOCH") from None

    async def pull(
        self, name: bytes, epoch: int, first_block: int, first_blocks: Sequence[int] = ()
    ) -> AsyncGenerator[BlockRun | PrefillResult, None]:
        """Blocks from `first_block` on as they become ready, then the result; raises as `check` does, at any time.

        `first_blocks` are those of KV groups 1, 2, …. The blocks of a run may be read until the next `await`;
        afterwards only while `check` succeeds.
        """
        positions = [first_block, *first_blocks]
        while True:
            ticket = self.check(name, epoch)
            if (run := _next_run(ticket, positions)) is not None:
                yield run
                positions[run.group] += len(run.blocks)
            elif ticket.result is not None:
                yield ticket.result
                return
            else:
                await self._changes.setdefault(name, asyncio.Event()).wait()

    def heartbeat(self, held: Iterable[tuple[bytes, int]]) -> list[bytes]:
        """Extends leases; returns the tickets that are refused."""
        return self._leases.heartbeat(held, self._clock())

    @contextmanager
    def presence(self, holder: str) -> Iterator[None]:
        """A connection of a holder, while it stands. A new one may come before the old one is known to be broken."""
        self._present[holder] += 1
        self._leases.holder_came(holder)
        try:
            yield
        finally:
            self._present[holder] -= 1
            if not self._present[holder]:
                del self._present[holder]
                self._leases.holder_left(holder, self._clock())

    @contextmanager
    def router_presence(self, router_id: str) -> Iterator[None]:
        """A watch of a router, while it stands. Of one without a name nothing is concluded."""
        if not router_id:
            yield
            return
        self._routers[router_id] += 1
        self._leases.router_came(router_id)
        try:
            yield
        finally:
            self._routers[router_id] -= 1
            if not self._routers[router_id]:
                del self._routers[router_id]
                self._leases.router_left(router_id, self._clock())

    def release(self, name: bytes, epoch: int) -> bool:
        """The holder is done with the ticket; False if there is nothing it could release."""
        block_ids = self._leases.release(name, epoch)
        return block_ids is not None and self._end(name, block_ids, "it was released")

    def drop(self, name: bytes, reason: str) -> bool:
        """Ends a ticket whatever its state; False if it is gone already."""
        block_ids = self._leases.drop(name)
        return block_ids is not None and self._end(name, block_ids, reason)

    def drop_all(self, reason: str) -> None:
        """Ends every ticket."""
        for ticket in self._leases.tickets:
            self.drop(ticket.name, reason)

    def reap(self, *, under_pressure: bool) -> list[Expired]:
        """Visits every lease once and ends those that are over."""
        ended = self._leases.reap(self._clock(), under_pressure=under_pressure)
        for expired in ended:
            ticket = expired.ticket
            fields = log_fields(ticket.request_id, ticket.trace_id, ticket=shown(ticket.name))
            logger.warning("a ticket of request %s ended: %s", ticket.request_id, expired.reason, extra=fields)
            self._end(ticket.name, ticket.block_ids, expired.reason)
        return ended

    def since(self, moment: float) -> str:
        """Milliseconds from `moment` until now, as text."""
        return f"{(self._clock() - moment) * 1000:.3f}"

    def wake(self, name: bytes) -> None:
        """Lets the ticket's pulls look again."""
        if (event := self._changes.pop(name, None)) is not None:
            event.set()

    def snapshot(self) -> tuple[TicketSnapshot, ...]:
        """Every ticket, as operators see it."""
        now = self._clock()
        return tuple(
            TicketSnapshot(
                ticket_prefix=shown(ticket.name),
                state=ticket.state.value,
                epoch=ticket.epoch,
                lease_ms=0
                if ticket.state is TicketState.COMPUTING
                else max(0, round((ticket.expires_at - now) * 1000)),
                num_blocks=ticket.num_blocks,
                request_id=ticket.request_id,
                holder=ticket.holder,
                holder_left=ticket.holder_left_at is not None,
            )
            for ticket in self._leases.tickets
        )

    def _end(self, name: bytes, block_ids: list[int], reason: str) -> bool:
        self._kv_cache.release(block_ids)
        self._ends[name] = reason
        if len(self._ends) > _MAX_REMEMBERED_ENDS:
            self._ends.popitem(last=False)
        self.wake(name)
        self._on_change()
        return True

    def _gone(self, name: bytes) -> NotFound:
        reason = self._ends.get(name, "it was never made here")
        return NotFound(f"ticket {shown(name)} is gone: {reason}", reason="TICKET_GONE")


def _next_run(ticket: Ticket, positions: Sequence[int]) -> BlockRun | None:
    """What can be read of the first KV group that has more. Raises InvalidArgument."""
    if len(positions) != ticket.num_groups:
        limit = f"must be {ticket.num_groups - 1} numbers, one for each KV group behind group 0"
        raise InvalidArgument("first_blocks", len(positions) - 1, limit)
    for group, position in enumerate(positions):
        first, blocks = ticket.of_group(group)
        if position < first:
            limit = f"must be at least {first}, where the {'' if group else 'lent '}blocks begin"
            raise InvalidArgument("first_blocks" if group else "first_block", position, limit)
        if position - first < len(blocks):
            return BlockRun(position, tuple(blocks[position - first : position - first + MAX_BLOCKS_PER_RUN]), group)
    return None


def shown(name: bytes) -> str:
    """Enough of a ticket to find it in logs, too little to use it."""
    return name[:4].hex()
