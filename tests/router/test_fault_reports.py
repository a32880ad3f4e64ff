"""What a fault leaves behind for operators: one log line with the ids that find it elsewhere, and counters."""

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from pagewire.errors import PagewireError
from pagewire.router_metrics import RouterMetrics
from router.backend import Started
from router.observer import RequestObserver
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import QUICK, a_call, a_system

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Counters:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.observer = RequestObserver(RouterMetrics(self._registry, "m"))

    def __call__(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"pagewire:{name}_total", {"model_name": "m", **labels}) or 0.0


async def test_a_fault_is_one_line_with_request_and_trace_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefills = [ScriptedPrefill("p0", Script(die_after_accept=True)), ScriptedPrefill("p1")]
    decodes = [ScriptedDecode("d0", Script(break_after=2)), ScriptedDecode("d1")]
    call = replace(a_call(), traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    counters = Counters()
    async with a_system(tmp_path, prefills=prefills, decodes=decodes, observer=counters.observer) as system:
        outputs = [output async for output in system.pipeline.generate(call)]
    started = outputs[0]
    assert isinstance(started, Started)
    faults = [record for record in caplog.records if record.name == "router.life"]
    assert [record.__dict__["worker_id"] for record in faults] == ["p0", "d0"]
    for record in faults:
        assert record.__dict__["request_id"] == started.request_id
        assert record.__dict__["trace_id"] == TRACE
    # Every attempt's name begins with the request's, so that one search finds it in all processes.
    attempts = [each.request_id for worker in (*prefills, *decodes) for each in worker.requests]
    assert all(each.startswith(f"{started.request_id}-") for each in attempts)
    assert (counters("prefill_retries"), counters("migrations")) == (1, 1)


async def test_what_a_request_went_through_counts_even_if_it_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decodes = [ScriptedDecode(f"d{number}", Script(fail_after=1)) for number in range(2)]
    counters = Counters()
    limits = replace(QUICK, max_migrations=1)
    async with a_system(tmp_path, decodes=decodes, observer=counters.observer, retry_limits=limits) as system:
        with pytest.raises(PagewireError):
            await system.generate()
    assert counters("migrations") == 2
    assert counters("request_failures", code="UNAVAILABLE") == 1
    assert counters("requests_rejected", reason="unavailable") == 0, "it had begun"
    assert "it failed: the request was moved" in caplog.records[-1].message


async def test_refusals_count_by_reason(tmp_path: Path) -> None:
    counters = Counters()
    full = ScriptedDecode(script=Script(delay=0.02))
    async with a_system(tmp_path, decodes=[full], observer=counters.observer, max_concurrent_requests=1) as system:
        first = system.pipeline.generate(a_call())
        await anext(first)
        for _ in range(2):
            with pytest.raises(PagewireError):
                await system.generate()
        await first.aclose()
        with pytest.raises(PagewireError):
            await system.generate(n=0)
        system.pipeline.start_drain()
        with pytest.raises(PagewireError) as caught:
            await system.generate()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert counters("requests_rejected", reason="max_concurrent_requests") == 2
    assert counters("requests_rejected", reason="invalid_argument") == 1
    assert counters("requests_rejected", reason="unavailable") == 1
    assert counters("request_failures", code="CANCELLED") == 1
