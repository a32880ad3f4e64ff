"""Which source is asked for what, for how long, and why none is."""

from dataclasses import dataclass, replace

import pytest

from engine.transfer.plane import Plane
from pagewire.worker_view import PrefixSource
from transfer_svc.fetch_offers import FetchSettings, Offers
from transfer_svc.rates import Rates

SIZE, BYTES = 16, 1000
SETTINGS = FetchSettings(min_tokens=64, min_deadline=0.0, slack=4.0)


@dataclass
class Prefix:
    """Of a sequence with so many blocks; each block takes one of the pool."""

    num_blocks: int = 2
    num_keys: int = 20

    @property
    def keys(self):
        return [b""] * self.num_keys

    def num_lacking(self, depth):
        return depth - self.num_blocks

    def deepest(self, most, num_blocks):
        return max(self.num_blocks, min(most, self.num_blocks + num_blocks))


def source(name, num_blocks, num_lower=0):
    return PrefixSource(f"{name}:1", name, 7, num_blocks, "prefill", num_lower)


def offers(prior_prefill=1e-3):
    """Computing takes longer than anything."""
    return Offers(Rates(prior_prefill), SIZE, BYTES)


def best(of, *sources, prefix=None, settings=SETTINGS, room=100, planes=None, now=0.0, always=False):
    return of.best(prefix or Prefix(), list(sources), settings, room=room, planes=planes or {}, now=now, always=always)


def test_the_one_that_saves_most():
    offer, _ = best(offers(), source("a", 10), source("b", 15), source("c", 12))
    assert offer is not None
    assert (offer.source.worker_id, offer.stop, offer.from_tier) == ("b", 15, False)
    offer, _ = best(offers(), source("a", 99))
    assert offer is not None
    assert offer.stop == 20, "the prompt ends there"


def test_of_equals_the_nearer_one():
    """A connected plane's link is faster than one that nobody knows yet."""
    offer, _ = best(offers(), source("a", 15), source("b", 15), planes={"b:1": Plane.SHM_VM})
    assert offer is not None
    assert offer.source.worker_id == "b"


def test_what_lies_in_a_tier_is_said_to_come_from_there():
    for num_lower, from_tier in ((0, False), (1, True)):
        offer, _ = best(offers(), source("a", 15, num_lower))
        assert offer is not None
        assert offer.from_tier is from_tier


def test_it_may_take_some_times_the_estimate_and_no_longer_than_computing():
    rates = Rates(1e6)
    fetch = rates.fetch_seconds("a:1", None, 13 * BYTES)
    of, one = Offers(rates, SIZE, BYTES), source("a", 15)
    (offer, _), (dear, reason) = best(of, one, settings=replace(SETTINGS, mode="always")), best(of, one)
    assert offer is not None
    assert offer.deadline == pytest.approx(4 * fetch)
    assert offer.saving == pytest.approx(13 * SIZE / 1e6 - fetch)
    assert (dear, reason) == (None, "dearer")
    rates = Rates(13 * SIZE / (1.5 * fetch))
    offer, _ = best(Offers(rates, SIZE, BYTES), one)
    assert offer is not None
    assert offer.deadline == pytest.approx(1.5 * fetch)
    offer, _ = best(Offers(rates, SIZE, BYTES), one, settings=replace(SETTINGS, min_deadline=9.0))
    assert offer is not None
    assert offer.deadline == 9.0


def test_why_there_is_none():
    of = offers()
    assert best(of, source("a", 2)) == (None, ""), "it has no more than is here"
    assert best(of, source("a", 5)) == (None, "short")
    assert best(of, source("a", 15), room=3) == (None, "pool")
    of.avoid(source("a", 15), until=5.0)
    assert best(of, source("a", 15), now=4.9) == (None, "avoided")
    offer, _ = best(of, source("a", 15), source("b", 12), now=4.9)
    assert offer is not None
    assert offer.source.worker_id == "b"
    offer, _ = best(of, source("a", 15), now=5.0)
    assert offer is not None


def test_whoever_asks_for_it_gets_it_whatever_computing_costs():
    of = offers(prior_prefill=1e12)
    assert best(of, source("a", 15)) == (None, "dearer")
    for sources in (source("a", 15), source("a", 3)):
        offer, _ = best(of, sources, always=True)
        assert offer is not None
    offer, reason = best(of, source("a", 15), room=0, always=True)
    assert (offer, reason) == (None, "pool")
