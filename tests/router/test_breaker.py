"""Circuit breakers: the state machine on plain data, and what they do to a router's requests."""

import asyncio
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from pagewire.errors import PagewireError
from pagewire.router_metrics import RouterMetrics
from router.breaker import BreakerPolicy, Breakers, BreakerState
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import a_system, wanted

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
W = ("w", 1)
POLICY = BreakerPolicy(num_failures=3, first_backoff=1.0, last_backoff=4.0)


def opened(now: float = 0.0) -> Breakers:
    breakers = Breakers(POLICY)
    for _ in range(3):
        breakers.failed(W, now, "broke")
    return breakers


def test_opens_after_failures_in_a_row() -> None:
    breakers = Breakers(POLICY)
    for _ in range(2):
        breakers.failed(W, 0, "broke")
    assert breakers.state(W) is CLOSED
    breakers.succeeded(W)
    for _ in range(2):
        breakers.failed(W, 0, "broke")
    assert not breakers.avoided(0)
    breakers.failed(W, 0, "broke")
    assert breakers.state(W) is OPEN
    assert breakers.avoided(0.9) == {W}


def test_one_probe_when_the_backoff_is_over() -> None:
    breakers = opened()
    assert not breakers.avoided(1.0)
    breakers.chosen(W, 1.0)
    assert breakers.state(W) is HALF_OPEN
    assert breakers.avoided(1.1) == {W}, "a probe is under way"
    breakers.succeeded(W)
    assert breakers.state(W) is CLOSED
    assert not breakers.avoided(1.1)
    assert not len(breakers)


def test_backoff_doubles_up_to_its_limit() -> None:
    breakers, now = opened(), 0.0
    for backoff in (1.0, 2.0, 4.0, 4.0):
        assert breakers.avoided(now + backoff - 0.01) == {W}
        now += backoff
        assert not breakers.avoided(now)
        breakers.chosen(W, now)
        breakers.failed(W, now, "again")
        assert breakers.state(W) is OPEN


def test_what_was_under_way_when_it_opened_does_not_count() -> None:
    breakers = opened()
    for _ in range(20):
        breakers.failed(W, 0.5, "the same session")
    assert not breakers.avoided(1.0)


def test_a_probe_that_nobody_reports_on_is_forgotten() -> None:
    breakers = opened()
    breakers.chosen(W, 1.0)
    assert breakers.avoided(1.9) == {W}
    assert not breakers.avoided(2.0)


def test_a_restarted_worker_is_another_one() -> None:
    said: list[tuple[str, BreakerState | None]] = []
    breakers = opened()
    breakers.on_change = lambda worker_id, state: said.append((worker_id, state))
    assert breakers.state(("w", 2)) is CLOSED
    breakers.keep_only([("w", 2)])
    assert not len(breakers)
    assert said == [("w", None)]


def test_metrics_follow_a_breakers_states() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, "m")
    breakers = Breakers(
        POLICY, lambda worker_id, state: metrics.breaker(worker_id, None if state is None else state.value)
    )

    def state() -> float | None:
        return registry.get_sample_value("pagewire:breaker_state", {"model_name": "m", "worker": "w"})

    for _ in range(3):
        breakers.failed(W, 0, "broke")
    assert state() == 2
    breakers.chosen(W, 1.0)
    assert state() == 1
    breakers.failed(W, 1.0, "again")
    assert registry.get_sample_value("pagewire:breaker_opens_total", {"model_name": "m"}) == 2
    breakers.chosen(W, 9.0)
    breakers.succeeded(W)
    assert state() == 0
    breakers.keep_only([])
    breakers.failed(W, 0, "broke")
    breakers.keep_only([])
    assert state() is None


# --- a router's requests ---


async def test_a_worker_that_keeps_failing_is_left_alone(tmp_path: Path) -> None:
    bad, good = ScriptedPrefill("p0", Script(die_after_accept=True)), ScriptedPrefill("p1")
    breakers = Breakers(BreakerPolicy(num_failures=2, first_backoff=60))
    async with a_system(tmp_path, prefills=[bad, good], decodes=[ScriptedDecode()], breakers=breakers) as system:
        for _ in range(5):
            assert (await system.generate()).token_ids == {0: wanted(8)}
        assert breakers.state(bad.worker.process) is OPEN
    assert len(bad.requests) == 2
    assert len(good.requests) == 5


async def test_a_worker_that_recovers_is_used_again(tmp_path: Path) -> None:
    bad, good = ScriptedDecode("d0", Script(break_after=1)), ScriptedDecode("d1")
    breakers = Breakers(BreakerPolicy(num_failures=1, first_backoff=0.3))
    async with a_system(tmp_path, decodes=[bad, good], breakers=breakers) as system:
        # A token came before each failure, so that the count starts anew: 1 is enough here.
        assert (await system.generate()).summary.decode_worker == "d1"
        assert breakers.state(bad.worker.process) is OPEN
        await asyncio.sleep(0.4)
        assert (await system.generate()).summary.decode_worker == "d0"
        assert breakers.state(bad.worker.process) is CLOSED


async def test_the_only_worker_is_asked_all_the_same(tmp_path: Path) -> None:
    decode = ScriptedDecode()
    breakers = Breakers(BreakerPolicy(num_failures=1, first_backoff=60))
    async with a_system(tmp_path, decodes=[decode], breakers=breakers) as system:
        breakers.failed(decode.worker.process, asyncio.get_running_loop().time(), "broke")
        assert (await system.generate()).token_ids == {0: wanted(8)}
        assert breakers.state(decode.worker.process) is CLOSED


async def test_a_request_that_is_refused_says_nothing_about_its_worker(tmp_path: Path) -> None:
    prefill = ScriptedPrefill(script=Script(refuse=grpc.StatusCode.INVALID_ARGUMENT))
    breakers = Breakers(BreakerPolicy(num_failures=1))
    async with a_system(tmp_path, prefills=[prefill], decodes=[ScriptedDecode()], breakers=breakers) as system:
        with pytest.raises(PagewireError):
            await system.generate()
    assert not len(breakers)
