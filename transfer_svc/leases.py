"""Tickets, epochs and leases: who may read which KV, and until when. Pure: time and randomness are arguments.

    open ──extend*──► computing ──complete──► leased ──────────► gone      (release, drop, expiry, revocation)
                          │  the Prefill stream owns it │  the lease owns it
                          └──drop (cancel, failure)─────┴──► gone
    lend ──extend*──► lent ──────────────────────────────────► gone      (the same; and at once when the pool is short)

Each attach makes a new epoch; what an older epoch says is refused. The table never frees a block: every way out of it
returns the block ids whose references the caller now has to release.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transfer_svc.ticket import (
    ManifestBlock,
    PrefillResult,
    StaleEpoch,
    Ticket,
    TicketError,
    TicketState,
    UnknownTicket,
)

TICKET_BYTES = 16
# A lost connection is not a lost worker: so long it may take to come back, or a router to give its ticket to another.
HOLDER_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Expired:
    """A ticket the reaper ended, and the references to release."""

    ticket: Ticket
    reason: str
    revoked: bool = False
    deserted: bool = False


class LeaseTable:
    """All tickets of a worker. Not thread-safe; `random_bytes(n)` must be unpredictable."""

    def __init__(self, lease_seconds: float, max_hold_seconds: float, random_bytes: Callable[[int], bytes]) -> None:
        self.lease_seconds = lease_seconds
        self.max_hold_seconds = max_hold_seconds
        self._random_bytes = random_bytes
        self._tickets: dict[bytes, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        return tuple(self._tickets.values())

    @property
    def num_held_blocks(self) -> int:
        """References that tickets hold."""
        return sum(ticket.num_blocks for ticket in self._tickets.values())

    @property
    def lent(self) -> tuple[Ticket, ...]:
        """Tickets over cached blocks, oldest first."""
        return tuple(ticket for ticket in self._tickets.values() if ticket.state is TicketState.LENT)

    def find(self, request_id: str) -> bytes | None:
        """The newest ticket of a request, if it has one."""
        names = (name for name in reversed(self._tickets) if self._tickets[name].request_id == request_id)
        return next(names, None)

    def open(
        self,
        request_id: str,
        num_tokens: int,
        trace_id: str = "",
        router_id: str = "",
        first_blocks: Sequence[int] = (),
    ) -> Ticket:
        """A new ticket; the caller's Prefill stream owns it until `complete`. `trace_id` is for log lines.

        `first_blocks`: where the manifest of each KV group begins, if there are several or the only one slides.
        """
        name, firsts = self._random_bytes(TICKET_BYTES), tuple(first_blocks)
        ticket = Ticket(name, request_id, num_tokens, self.lease_seconds, trace_id=trace_id, first_blocks=firsts)
        ticket.router_id = router_id
        self._tickets[ticket.name] = ticket
        return ticket

    def lend(
        self,
        holder: str,
        block_ids: Sequence[int],
        first_block: int,
        num_tokens: int,
        lease_seconds: float,
        now: float,
        first_blocks: Sequence[int] = (),
        others: Sequence[Sequence[int]] = (),
    ) -> Ticket:
        """A ticket over cached blocks, attached by `holder`; the references on all of `block_ids` pass to it.

        `extend` makes those from number `first_block` of them on readable, in order; with the last one the ticket
        has its result. `others` are the other KV groups' blocks, and `first_blocks` where in the sequence each begins.
        """
        name, firsts = self._random_bytes(TICKET_BYTES), tuple(first_blocks)
        ticket = Ticket(name, f"lent to {holder}", num_tokens, lease_seconds, first_blocks=firsts)
        ticket.pending_others = [list(each) for each in others]
        ticket.state, ticket.epoch, ticket.holder = TicketState.LENT, 1, holder
        ticket.leased_at, ticket.expires_at = now, now + lease_seconds
        ticket.num_cached_tokens = num_tokens
        ticket.leading_ids, ticket.pending_ids = tuple(block_ids[:first_block]), list(block_ids[first_block:])
        self._tickets[ticket.name] = ticket
        return ticket

    def start(self, name: bytes, num_cached_tokens: int) -> None:
        """A step has tokens of the request. A ticket that is gone is left alone."""
        if (ticket := self._tickets.get(name)) is not None:
            ticket.num_cached_tokens = num_cached_tokens

    def extend(self, name: bytes, blocks: Iterable[ManifestBlock], group: int = 0) -> None:
        """More blocks of a KV group can be read; the references on them pass to the ticket. Raises UnknownTicket."""
        ticket, more = self._get(name), list(blocks)
        ticket.of_group(group)[1].extend(more)
        if ticket.state is TicketState.LENT:
            pending = ticket.pending_others[group - 1] if group else ticket.pending_ids
            del pending[: len(more)]
            if not ticket.pending_ids and not any(ticket.pending_others):
                ticket.result = PrefillResult(ticket.num_tokens, ticket.num_tokens, (), ticket.leased_at)

    def complete(self, name: bytes, result: PrefillResult, now: float) -> list[int]:
        """Prefill is done: from now on a lease owns the blocks. Returns references to release.

        If every choice has ended and nobody attached, the blocks go at once and the lease holds the result alone.
        """
        ticket = self._get(name)
        if ticket.is_abandoned:
            return self._remove(ticket)
        ticket.state = TicketState.LEASED
        ticket.result = result
        ticket.leased_at = now
        ticket.expires_at = now + ticket.lease_seconds
        if not result.all_finished or ticket.epoch:
            return []
        block_ids, ticket.blocks, ticket.others = ticket.block_ids, [], [[] for _ in ticket.others]
        return block_ids

    def attach(self, name: bytes, holder: str, now: float) -> Ticket:
        """Takes the ticket over under a new epoch and extends its lease. Raises UnknownTicket."""
        ticket = self._get(name)
        ticket.epoch += 1
        ticket.is_abandoned = False
        ticket.holder, ticket.holder_left_at = holder, None
        ticket.expires_at = max(ticket.expires_at, now + ticket.lease_seconds)
        return ticket

    def check(self, name: bytes, epoch: int) -> Ticket:
        """The ticket, if `epoch` is its newest. Raises UnknownTicket or StaleEpoch."""
        ticket = self._get(name)
        if ticket.epoch != epoch:
            raise StaleEpoch(f"epoch {epoch} is over, epoch {ticket.epoch} holds the ticket")
        return ticket

    def heartbeat(self, held: Iterable[tuple[bytes, int]], now: float) -> list[bytes]:
        """Extends the leases of (ticket, epoch) pairs; returns the tickets that are refused."""
        refused = []
        for name, epoch in held:
            try:
                ticket = self.check(name, epoch)
            except TicketError:
                refused.append(name)
            else:
                ticket.expires_at, ticket.holder_left_at = now + ticket.lease_seconds, None
        return refused

    def holder_left(self, holder: str, now: float) -> None:
        """The holder's connection broke. Unless it is heard of again, its tickets end `HOLDER_GRACE_SECONDS` later."""
        for ticket in self._tickets.values():
            if ticket.holder == holder and ticket.holder_left_at is None:
                ticket.holder_left_at = now

    def holder_came(self, holder: str) -> None:
        """It is there (again): it goes on where it was."""
        for ticket in self._tickets.values():
            if ticket.holder == holder:
                ticket.holder_left_at = None

    def router_left(self, router_id: str, now: float) -> None:
        """No watch of the router's stands any more."""
        for ticket in self._tickets.values():
            if ticket.router_id == router_id and ticket.router_left_at is None:
                ticket.router_left_at = now

    def router_came(self, router_id: str) -> None:
        """It watches (again)."""
        for ticket in self._tickets.values():
            if ticket.router_id == router_id:
                ticket.router_left_at = None

    def release(self, name: bytes, epoch: int) -> list[int] | None:
        """The holder is done. None (and no change) if the ticket is unknown or belongs to another epoch.

        While prefill still runs the stream owns the blocks: then they go when it ends, unless somebody attaches.
        """
        ticket = self._tickets.get(name)
        if ticket is None or ticket.epoch != epoch:
            return None
        if ticket.state is TicketState.COMPUTING:
            ticket.is_abandoned = True
            return []
        return self._remove(ticket)

    def drop(self, name: bytes) -> list[int] | None:
        """The owner (the Prefill stream, or the router after it) gives up, whatever the state and epoch."""
        ticket = self._tickets.get(name)
        return None if ticket is None else self._remove(ticket)

    def reap(self, now: float, *, under_pressure: bool) -> list[Expired]:
        """Ends every lease that is over, whose holder is gone or that nobody will want; under pool pressure also every
        one held longer than `max_hold_seconds`."""
        ended = []
        for ticket in self.tickets:
            if ticket.state is TicketState.COMPUTING:
                continue
            if now >= ticket.expires_at:
                ended.append(Expired(ticket, "its lease expired"))
            elif ticket.holder_left_at is not None and now >= ticket.holder_left_at + HOLDER_GRACE_SECONDS:
                ended.append(Expired(ticket, f"the connection of its holder {ticket.holder} broke", deserted=True))
            elif ticket.orphaned_at is not None and now >= ticket.orphaned_at:
                ended.append(Expired(ticket, f"the router {ticket.router_id} that asked for it is gone", deserted=True))
            elif under_pressure and now - ticket.leased_at >= self.max_hold_seconds:
                ended.append(
                    Expired(ticket, f"held longer than {self.max_hold_seconds:g} s while requests wait", revoked=True)
                )
        for expired in ended:
            del self._tickets[expired.ticket.name]
        return ended

    def _get(self, name: bytes) -> Ticket:
        ticket = self._tickets.get(name)
        if ticket is None:
            raise UnknownTicket("the ticket is unknown, released, expired, or its prefill failed")
        return ticket

    def _remove(self, ticket: Ticket) -> list[int]:
        del self._tickets[ticket.name]
        return ticket.block_ids
