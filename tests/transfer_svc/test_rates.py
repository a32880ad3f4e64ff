"""Estimates follow what was measured, and a little noise does not turn them over."""

import pytest

from engine.transfer.plane import Plane
from transfer_svc.rates import Rates


def test_priors_hold_until_something_was_measured():
    rates = Rates(prior_prefill=1000.0)
    assert rates.compute_seconds(500) == pytest.approx(0.5)
    shm, grpc, unknown = (rates.fetch_seconds("a:1", plane, 1 << 20) for plane in (Plane.SHM_VM, Plane.GRPC, None))
    assert shm < grpc < unknown


def test_a_steady_rate_is_learnt():
    rates = Rates()
    for _ in range(30):
        rates.prefill.observe(512, 0.064)
        rates.link("a:1", Plane.GRPC).observe(10 << 20, 0.12, 1 << 20, 0.03)
    assert rates.compute_seconds(8000) == pytest.approx(1.0, rel=0.1)
    # 9 MiB in 0.09 s; the first MiB took 0.01 of its 0.03 s.
    assert rates.fetch_seconds("a:1", Plane.GRPC, 100 << 20) == pytest.approx(0.02 + 1.0, rel=0.1)
    assert rates.fetch_seconds("b:1", Plane.GRPC, 100 << 20) < 0.6, "another peer has its own rates"


def test_small_steps_count_little():
    rates = Rates()
    for _ in range(30):
        rates.prefill.observe(512, 0.5)
    before = rates.prefill.per_second
    rates.prefill.observe(1, 0.02)
    assert rates.prefill.per_second == pytest.approx(before, rel=0.05)
    rates.prefill.observe(0, 1.0)
    assert rates.prefill.per_second == pytest.approx(before, rel=0.05), "a step without prefill says nothing"


def test_a_silent_link_becomes_dear():
    rates = Rates()
    cheap = rates.fetch_seconds("a:1", Plane.SHM_VM, 1000)
    rates.link("a:1", Plane.SHM_VM).observe(0, 2.0, 0, 2.0)
    assert rates.fetch_seconds("a:1", Plane.SHM_VM, 1000) > cheap + 0.5


def test_links_are_bounded():
    rates = Rates()
    for number in range(3000):
        rates.link(f"host:{number}", Plane.GRPC)
    assert len(rates._links) == 1024
