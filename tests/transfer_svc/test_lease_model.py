"""A model check of LeaseTable: every interleaving that hypothesis finds, against a model of who holds which reference.

The model is a count of references by ticket. Whatever happens, each reference that went into the table comes out
exactly once, only the newest epoch can read, extend or release, and a lease that is over is ended by the next reap.
"""

import itertools
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from engine.request import FinishReason, TokenOutput
from transfer_svc.leases import HOLDER_GRACE_SECONDS, LeaseTable
from transfer_svc.ticket import (
    ROUTER_GRACE_SECONDS,
    ManifestBlock,
    PrefillResult,
    StaleEpoch,
    TicketState,
    UnknownTicket,
)

LEASE, MAX_HOLD = 10.0, 25.0


@dataclass
class Model:
    """What must be true of one ticket."""

    blocks: list[int] = field(default_factory=list)
    epoch: int = 0
    leased_at: float | None = None
    expires_at: float = 0.0
    abandoned: bool = False
    left_at: float | None = None
    router_left_at: float | None = None
    gone: bool = False


class Leases(RuleBasedStateMachine):
    """Prefill stream, decode workers (also old ones), router and reaper act in any order; time only goes on."""

    tickets: Bundle[bytes] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        names = itertools.count(1)
        self.table = LeaseTable(LEASE, MAX_HOLD, lambda n: next(names).to_bytes(n, "big"))
        self.models: dict[bytes, Model] = {}
        self.now = 0.0
        self.block_ids = itertools.count()
        self.num_given = self.num_returned = 0

    def end(self, name: bytes, returned: list[int] | None) -> None:
        model = self.models[name]
        assert returned == model.blocks
        self.num_returned += len(model.blocks)
        model.blocks, model.gone = [], True

    @precondition(lambda self: len(self.models) < 4)  # few, so that much happens to each
    @rule(target=tickets)
    def open(self) -> bytes:
        name = self.table.open("r", 9, router_id="router").name
        assert name not in self.models
        self.models[name] = Model()
        return name

    @rule(name=tickets, num_blocks=st.integers(1, 3))
    def extend(self, name: bytes, num_blocks: int) -> None:
        model = self.models[name]
        if model.leased_at is not None:
            return  # the stream has ended, nobody extends
        ids = [next(self.block_ids) for _ in range(num_blocks)]
        manifest = [ManifestBlock(block_id, 1, 0, b"") for block_id in ids]
        if model.gone:
            with pytest.raises(UnknownTicket):
                self.table.extend(name, manifest)
            return
        self.table.extend(name, manifest)
        model.blocks += ids
        self.num_given += num_blocks

    @rule(name=tickets, all_finished=st.booleans())
    def complete(self, name: bytes, all_finished: bool) -> None:
        model = self.models[name]
        if model.leased_at is not None and not model.gone:
            return
        reason = FinishReason.STOP if all_finished else None
        result = PrefillResult(9, 0, (TokenOutput("r", 0, 0, 7, None, reason),))
        if model.gone:
            with pytest.raises(UnknownTicket):
                self.table.complete(name, result, self.now)
            return
        returned = self.table.complete(name, result, self.now)
        if model.abandoned:
            self.end(name, returned)
            return
        model.leased_at, model.expires_at = self.now, self.now + LEASE
        if all_finished and not model.epoch:
            assert returned == model.blocks
            self.num_returned += len(returned)
            model.blocks = []
        else:
            assert returned == []

    @rule(name=tickets)
    def attach(self, name: bytes) -> None:
        model = self.models[name]
        if model.gone:
            with pytest.raises(UnknownTicket):
                self.table.attach(name, "d", self.now)
            return
        model.epoch += 1
        model.abandoned, model.left_at = False, None
        model.expires_at = max(model.expires_at, self.now + LEASE)
        assert self.table.attach(name, "d", self.now).epoch == model.epoch

    @rule(name=tickets, age=st.integers(0, 2))
    def heartbeat(self, name: bytes, age: int) -> None:
        """`age` 0 is the newest epoch."""
        model = self.models[name]
        epoch = model.epoch - age
        is_good = not model.gone and age == 0
        assert self.table.heartbeat([(name, epoch)], self.now) == ([] if is_good else [name])
        if is_good:
            model.expires_at, model.left_at = self.now + LEASE, None
            assert self.table.check(name, epoch).block_ids == model.blocks
        else:
            with pytest.raises(UnknownTicket if model.gone else StaleEpoch):
                self.table.check(name, epoch)

    @rule()
    def holder_leaves(self) -> None:
        self.table.holder_left("d", self.now)
        for model in self.models.values():
            if model.epoch and model.left_at is None:
                model.left_at = self.now

    @rule()
    def holder_comes_back(self) -> None:
        self.table.holder_came("d")
        for model in self.models.values():
            model.left_at = None

    @rule()
    def router_leaves(self) -> None:
        self.table.router_left("router", self.now)
        for model in self.models.values():
            if model.router_left_at is None:
                model.router_left_at = self.now

    @rule()
    def router_comes_back(self) -> None:
        self.table.router_came("router")
        for model in self.models.values():
            model.router_left_at = None

    @rule(name=tickets, age=st.integers(0, 2))
    def release(self, name: bytes, age: int) -> None:
        model = self.models[name]
        returned = self.table.release(name, model.epoch - age)
        if model.gone or age:
            assert returned is None
        elif model.leased_at is None:
            assert returned == []
            model.abandoned = True
        else:
            self.end(name, returned)

    @rule(name=consumes(tickets))
    def drop(self, name: bytes) -> None:
        returned = self.table.drop(name)
        if self.models[name].gone:
            assert returned is None
        else:
            self.end(name, returned)

    @rule(name=tickets)
    def drop_and_go_on(self, name: bytes) -> None:
        """Later messages about it must find nothing."""
        if not self.models[name].gone:
            self.end(name, self.table.drop(name))

    @rule(seconds=st.floats(0.5, 15.0), under_pressure=st.booleans())
    def reap(self, seconds: float, under_pressure: bool) -> None:
        self.now += seconds
        over = {
            name
            for name, model in self.models.items()
            if not model.gone
            and model.leased_at is not None
            and (
                self.now >= model.expires_at
                or (model.left_at is not None and self.now >= model.left_at + HOLDER_GRACE_SECONDS)
                or self.is_orphaned(model)
                or (under_pressure and self.now - model.leased_at >= MAX_HOLD)
            )
        }
        ended = self.table.reap(self.now, under_pressure=under_pressure)
        assert {expired.ticket.name for expired in ended} == over
        for expired in ended:
            self.end(expired.ticket.name, expired.ticket.block_ids)

    def is_orphaned(self, model: Model) -> bool:
        if model.router_left_at is None or self.now < model.router_left_at + ROUTER_GRACE_SECONDS:
            return False
        return not model.epoch or self.now >= model.expires_at - LEASE / 3

    @invariant()
    def every_reference_is_somewhere(self) -> None:
        alive = {name: model for name, model in self.models.items() if not model.gone}
        assert {ticket.name for ticket in self.table.tickets} == alive.keys()
        assert self.table.num_held_blocks == sum(len(model.blocks) for model in alive.values())
        assert self.num_given == self.num_returned + self.table.num_held_blocks
        for ticket in self.table.tickets:
            assert (ticket.state is TicketState.LEASED) == (alive[ticket.name].leased_at is not None)

    def teardown(self) -> None:
        for ticket in self.table.tickets:
            self.end(ticket.name, self.table.drop(ticket.name))
        assert self.num_given == self.num_returned


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
