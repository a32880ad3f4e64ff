"""What the metrics say of hits: by source, stale ones, and those computed twice."""

from prometheus_client import CollectorRegistry

from pagewire.router_metrics import RouterMetrics
from router.observer import RequestObserver
from router.placement import Placement, Worker
from router.request import Summary

P, D = Worker("p", 1, "p:1"), Worker("d", 1, "d:1")


def observed(cached: int, placement: Placement | None) -> dict[str, float]:
    """The counters that are not 0 after one request with `cached` of 100 prompt tokens."""
    registry = CollectorRegistry()
    summary = Summary(100, 5, cached, 1.0, 2.0, 3.0, "p" if placement and placement.prefill else "d", "d")
    RequestObserver(RouterMetrics(registry, "m")).finished(summary, placement)
    names = ("hit_tokens", "expected_hits", "stale_hits", "stale_hit_tokens", "missed_assumed_tokens",
             "duplicate_prefill_tokens")  # fmt: skip
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if family.name.removeprefix("pagewire:") in names and sample.name.endswith("_total") and sample.value:
                source = sample.labels.get("source")
                found[family.name.removeprefix("pagewire:") + (f"/{source}" if source else "")] = sample.value
    return found


def test_a_hit_that_was_promised_and_kept() -> None:
    assert observed(80, Placement(P, D, 80, 80, 80, 80)) == {"hit_tokens/prefill_device": 80, "expected_hits": 1}
    assert observed(80, Placement(None, D, 80, 80, 80, 80)) == {"hit_tokens/decode_device": 80, "expected_hits": 1}
    assert observed(96, Placement(P, D, 80, 80, 80, 80)) == {"hit_tokens/prefill_device": 96, "expected_hits": 1}
    assert observed(0, Placement(P, D, 0, 0, 0)) == {}


def test_a_stale_hit_is_what_the_index_promised_in_vain() -> None:
    assert observed(16, Placement(P, D, 80, 80, 80, 80)) == {
        "hit_tokens/prefill_device": 16,
        "expected_hits": 1,
        "stale_hits": 1,
        "stale_hit_tokens": 64,
        "duplicate_prefill_tokens": 64,
    }


def test_what_lay_below_the_device_may_be_computed_instead() -> None:
    """No stale hit: the worker found that dearer to load. What its device was said to have counts as before."""
    placement = Placement(P, D, 80, 80, 80, 32)
    assert observed(32, placement) == {
        "hit_tokens/prefill_device": 32,
        "expected_hits": 1,
        "duplicate_prefill_tokens": 48,
    }
    assert observed(16, placement)["stale_hit_tokens"] == 16


def test_what_was_only_assumed_is_no_promise() -> None:
    assert observed(32, Placement(P, D, 16, 80, 16, 16)) == {
        "hit_tokens/prefill_device": 32,
        "expected_hits": 1,
        "missed_assumed_tokens": 48,
    }


def test_computed_though_another_worker_had_it() -> None:
    assert observed(0, Placement(P, D, 0, 0, 64)) == {"duplicate_prefill_tokens": 64}


def test_after_a_retry_nobody_knows_whose_promise_it_was() -> None:
    assert observed(0, None) == {}
