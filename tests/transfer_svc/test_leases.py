"""Tickets end in every way there is, exactly once, and old epochs are refused."""

import itertools

import pytest

from engine.request import FinishReason, TokenOutput
from transfer_svc.leases import LeaseTable
from transfer_svc.sender import KvSender
from transfer_svc.ticket import ManifestBlock, PrefillResult, StaleEpoch, TicketState, UnknownTicket

RESULT = PrefillResult(num_tokens=9, num_cached_tokens=4, first_tokens=())


def table(lease: float = 10.0, max_hold: float = 60.0) -> LeaseTable:
    counter = itertools.count(1)
    return LeaseTable(lease, max_hold, lambda n: next(counter).to_bytes(n, "big"))


def blocks(*ids: int) -> list[ManifestBlock]:
    return [ManifestBlock(i, 1, i * 7, bytes([i]) * 32) for i in ids]


def test_life_of_a_ticket():
    leases = table()
    ticket = leases.open("r", 9)
    leases.extend(ticket.name, blocks(3, 5))
    assert leases.attach(ticket.name, "d", 100.0).epoch == 1
    assert leases.reap(1e9, under_pressure=True) == [], "the stream owns it"
    leases.extend(ticket.name, blocks(4))
    leases.complete(ticket.name, RESULT, 200.0)
    assert ticket.state is TicketState.LEASED
    assert leases.num_held_blocks == 3
    assert leases.release(ticket.name, 1) == [3, 5, 4]
    assert leases.release(ticket.name, 1) is None
    assert len(leases) == 0
    with pytest.raises(UnknownTicket):
        leases.extend(ticket.name, blocks(6))


def test_lease_starts_at_completion_and_moves_with_heartbeats():
    leases = table(lease=10)
    ticket = leases.open("r", 9)
    leases.complete(ticket.name, RESULT, 100.0)
    epoch = leases.attach(ticket.name, "d", 105.0).epoch
    assert leases.heartbeat([(ticket.name, epoch), (b"?" * 16, 1)], 112.0) == [b"?" * 16]
    assert leases.reap(121.9, under_pressure=False) == []
    (expired,) = leases.reap(122.0, under_pressure=False)
    assert expired.ticket is ticket
    assert leases.heartbeat([(ticket.name, epoch)], 122.0) == [ticket.name]


def test_short_leases_do_not_wait_behind_long_ones():
    leases = table(lease=10)
    first, second = leases.open("a", 9), leases.open("b", 9)
    leases.complete(first.name, RESULT, 0.0)
    leases.complete(second.name, RESULT, 0.0)
    leases.attach(first.name, "d", 0.0)
    leases.heartbeat([(first.name, 1)], 9.0)
    assert [e.ticket for e in leases.reap(10.0, under_pressure=False)] == [second]


def test_older_epochs_are_refused_in_everything():
    leases = table()
    ticket = leases.open("r", 9)
    leases.complete(ticket.name, RESULT, 0.0)
    old, new = leases.attach(ticket.name, "d1", 1.0).epoch, leases.attach(ticket.name, "d2", 2.0).epoch
    assert new > old
    with pytest.raises(StaleEpoch):
        leases.check(ticket.name, old)
    expires_at = ticket.expires_at
    assert leases.heartbeat([(ticket.name, old)], 8.0) == [ticket.name]
    assert ticket.expires_at == expires_at
    assert leases.release(ticket.name, old) is None
    assert leases.check(ticket.name, new) is ticket
    assert leases.release(ticket.name, 0) is None


def test_drop_during_prefill_ends_it():
    leases = table()
    ticket = leases.open("r", 9)
    leases.extend(ticket.name, blocks(1))
    assert leases.drop(ticket.name) == [1]
    assert leases.drop(ticket.name) is None


@pytest.mark.parametrize("successor", [False, True])
def test_release_during_prefill_counts_at_its_end_unless_somebody_attaches(successor):
    leases = table()
    ticket = leases.open("r", 9)
    leases.extend(ticket.name, blocks(1))
    assert leases.release(ticket.name, leases.attach(ticket.name, "d", 0.0).epoch) == []
    leases.extend(ticket.name, blocks(2))
    if successor:
        leases.attach(ticket.name, "d2", 0.0)
    assert leases.complete(ticket.name, RESULT, 0.0) == ([] if successor else [1, 2])
    assert len(leases) == successor


def test_max_hold_counts_only_under_pressure():
    leases = table(lease=10, max_hold=15)
    ticket = leases.open("r", 9)
    leases.complete(ticket.name, RESULT, 0.0)
    leases.attach(ticket.name, "d", 0.0)
    for now in (5.0, 10.0, 15.0):
        assert leases.heartbeat([(ticket.name, 1)], now) == []
    assert leases.reap(16.0, under_pressure=False) == []
    assert [e.ticket for e in leases.reap(16.0, under_pressure=True)] == [ticket]


@pytest.mark.parametrize("attached", [False, True])
def test_nobody_needs_the_kv_of_a_request_that_has_ended(attached):
    leases = table()
    ticket = leases.open("r", 9)
    leases.extend(ticket.name, blocks(1, 2))
    if attached:
        leases.attach(ticket.name, "d", 0.0)
    result = PrefillResult(9, 0, (TokenOutput("r", 0, 0, 5, finish_reason=FinishReason.STOP),))
    assert leases.complete(ticket.name, result, 0.0) == ([] if attached else [1, 2])
    assert leases.num_held_blocks == (2 if attached else 0)
    assert leases.attach(ticket.name, "d", 1.0).result is result


def test_lent_blocks_become_readable_in_order_and_go_back_whole():
    leases = table(lease=30)
    ticket = leases.lend("p1/7", [3, 5, 4, 8], 1, 16, 10.0, 100.0)
    assert (ticket.state, ticket.epoch, ticket.first_block, ticket.num_blocks) == (TicketState.LENT, 1, 1, 4)
    assert leases.lent == (ticket,)
    leases.extend(ticket.name, blocks(5, 4))
    assert ticket.result is None
    assert (ticket.block_ids, leases.num_held_blocks) == ([3, 5, 4, 8], 4)
    leases.extend(ticket.name, blocks(8))
    assert ticket.result is not None
    assert ticket.result.num_tokens == 16
    assert [block.block_id for block in ticket.blocks] == [5, 4, 8]
    assert leases.release(ticket.name, 1) == [3, 5, 4, 8]
    assert leases.lent == ()


def test_a_lent_ticket_has_a_lease_of_its_own():
    leases = table(lease=30)
    ticket = leases.lend("p1/7", [3], 0, 4, 10.0, 100.0)
    assert leases.heartbeat([(ticket.name, 1)], 105.0) == []
    assert leases.reap(114.9, under_pressure=False) == []
    (expired,) = leases.reap(115.0, under_pressure=False)
    assert expired.ticket.block_ids == [3]


def test_a_lent_ticket_is_not_found_by_a_request_id():
    leases = table()
    leases.lend("p1/7", [3], 0, 4, 10.0, 0.0)
    assert leases.find("") is None


def test_tickets_of_a_holder_that_left_end_after_a_grace():
    leases = table(lease=30)
    mine, other, back, computing = (leases.open(name, 9) for name in ("mine", "other", "back", "computing"))
    for ticket in (mine, other, back):
        leases.complete(ticket.name, RESULT, 100.0)
    for ticket in (mine, back, computing):
        leases.attach(ticket.name, "d/1", 100.0)
    leases.attach(other.name, "d/2", 100.0)
    leases.holder_left("d/1", 101.0)
    leases.holder_left("d/1", 101.9)  # counts from the first
    leases.attach(back.name, "d/2", 101.5)  # the router has given it to another one
    assert leases.reap(101.99, under_pressure=False) == []
    (expired,) = leases.reap(102.0, under_pressure=False)
    assert (expired.ticket, expired.deserted) == (mine, True)
    # The stream owns it until it ends; then nobody is there to take it.
    leases.complete(computing.name, RESULT, 105.0)
    assert [each.ticket for each in leases.reap(105.0, under_pressure=False)] == [computing]
    assert leases.tickets == (other, back)


@pytest.mark.parametrize("how", ["connection", "heartbeat"])
def test_a_holder_that_comes_back_goes_on(how):
    leases = table(lease=30)
    ticket = leases.open("r", 9)
    leases.complete(ticket.name, RESULT, 100.0)
    leases.attach(ticket.name, "d/1", 100.0)
    leases.holder_left("d/1", 101.0)
    if how == "connection":
        leases.holder_came("d/1")
    else:
        assert leases.heartbeat([(ticket.name, 1)], 101.9) == []
    assert leases.reap(110.0, under_pressure=False) == []


def test_without_its_router_a_ticket_that_nobody_took_ends_after_a_grace():
    leases = table(lease=30)
    waiting, taken, others, computing = (
        leases.open(name, 9, router_id=router) for name, router in (("a", "r1"), ("b", "r1"), ("c", "r2"), ("d", "r1"))
    )
    for ticket in (waiting, taken, others):
        leases.complete(ticket.name, RESULT, 100.0)
    leases.attach(taken.name, "d/1", 100.0)
    leases.router_left("r1", 101.0)
    assert leases.reap(105.9, under_pressure=False) == []
    (expired,) = leases.reap(106.0, under_pressure=False)
    assert (expired.ticket, expired.deserted) == (waiting, True)
    # Who took one still reads it as long as its heartbeats come: only the router is gone, or only its connection.
    assert leases.heartbeat([(taken.name, 1)], 110.0) == []
    assert leases.reap(129.9, under_pressure=False) == []
    assert {each.ticket.name for each in leases.reap(130.0, under_pressure=False)} == {taken.name, others.name}
    assert leases.tickets == (computing,)  # the stream's


def test_of_a_router_without_a_name_nothing_is_concluded():
    leases = table(lease=30)
    ticket = leases.open("a", 9)
    leases.complete(ticket.name, RESULT, 100.0)
    sender = KvSender(leases, None, lambda: 101.0, lambda: None)
    with sender.router_presence(""):
        pass
    assert ticket.router_left_at is None


def test_a_router_that_comes_back_finds_its_tickets():
    leases = table(lease=30)
    ticket = leases.open("a", 9, router_id="r1")
    leases.complete(ticket.name, RESULT, 100.0)
    leases.router_left("r1", 101.0)
    leases.router_came("r1")
    assert leases.reap(129.0, under_pressure=False) == []
