"""The hop to the event loop: whoever fails at taking a step, its requests end and the next ones are served."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from engine.host import EngineHost
from engine.request import EngineRequest, StepOutput
from engine.sequence import Schedule
from kvstore.events import CacheEvent
from kvstore.registry import WorkerRecord
from pagewire.sampling import SamplingParams
from pagewire.worker_metrics import WorkerMetrics
from tests.engine.fake_engine import fake_engine

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


class Receiver:
    """Keeps what came; `prepare` or `on_step`, whichever `broken` names, raises at the first token."""

    def __init__(self, broken: str, *, for_ever: bool = False) -> None:
        self.broken, self.for_ever = broken, for_ever
        self.num_calls = 0
        self.failed: dict[str, str] = {}
        self.ended: set[str] = set()

    def _break(self, where: str, step: StepOutput) -> None:
        if where == self.broken and (step.tokens or self.for_ever):
            self.broken = self.broken if self.for_ever else ""
            raise RuntimeError("a bug")

    def prepare(self, step: StepOutput) -> None:
        self._break("prepare", step)

    def on_step(self, step: StepOutput, prepared: None) -> None:
        self.num_calls += 1
        self._break("on_step", step)
        self.failed |= {failed.request_id: failed.message for failed in step.failed}
        self.ended |= {token.request_id for token in step.tokens if token.finish_reason}


class Listener:
    """A publisher that keeps what it is told, by kind."""

    record = WorkerRecord("w", "here:1", "prefill", 1)
    state = "connected"

    def __init__(self) -> None:
        self.keys: dict[str, set[bytes]] = {"stored": set(), "removed": set()}
        self.has_removals = asyncio.Event()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            self.keys[event.kind] |= set(event.keys)
        if self.keys["removed"]:
            self.has_removals.set()

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def quiesce(self, timeout: float = 10.0) -> None: ...


@asynccontextmanager
async def running(receiver: Receiver, listener: Listener | None = None) -> AsyncIterator[EngineHost[None]]:
    engine, _ = fake_engine()
    metrics = WorkerMetrics(CollectorRegistry(), "m")
    host = EngineHost(engine, metrics, prepare=receiver.prepare, on_step=receiver.on_step)
    await host.start(listener)
    try:
        yield host
    finally:
        await host.stop_engine()
        await host.stop()
        engine.close()
    assert engine.kv_cache.num_referenced == 0


async def until(host: EngineHost[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await host.wait_for_change()


async def test_what_a_step_evicts_is_published_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then routers promise it: a prefill step takes a second, and the index a few milliseconds."""
    listener, may_go_on = Listener(), threading.Event()
    async with running(receiver := Receiver(""), listener) as host:
        execute = host.engine._runner.execute

        def slow(schedule: Schedule) -> object:
            if host.kv_cache.stats().num_evictions:
                assert may_go_on.wait(60)
            return execute(schedule)

        monkeypatch.setattr(host.engine._runner, "execute", slow)
        for number in range(2):  # 18 of 16 blocks: the second evicts what the first left
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            host.add(EngineRequest(f"{number}", tuple(range(5 + number, 41 + number)), params))
        try:
            await asyncio.wait_for(listener.has_removals.wait(), 60)
            assert "1" not in receiver.ended
            assert listener.keys["removed"] <= listener.keys["stored"]
        finally:
            may_go_on.set()
        await until(host, lambda: "1" in receiver.ended)


@pytest.mark.parametrize("broken", ["prepare", "on_step"])
async def test_a_lost_step_fails_its_requests(broken: str) -> None:
    receiver = Receiver(broken)
    async with running(receiver) as host:
        host.add(EngineRequest("lost", (5, 6), LONG))
        await until(host, lambda: bool(receiver.failed))
        assert receiver.failed == {"lost": "its output was lost: RuntimeError: a bug"}
        assert not host.engine.has_work
        host.add(EngineRequest("good", (5, 6), SamplingParams(max_tokens=3, ignore_eos=True)))
        await until(host, lambda: "good" in receiver.ended)


async def test_failing_at_the_failure_too_does_not_go_round_in_circles() -> None:
    receiver = Receiver("on_step", for_ever=True)
    async with running(receiver) as host:
        host.add(EngineRequest("lost", (5, 6), SamplingParams(max_tokens=1)))
        await until(host, lambda: receiver.num_calls == 2)
        await asyncio.sleep(0.05)
        assert receiver.num_calls == 2


async def test_a_device_thread_without_a_receiver_dies_and_says_so() -> None:
    receiver = Receiver("prepare", for_ever=True)
    async with running(receiver) as host:
        host.add(EngineRequest("lost", (5, 6), LONG))
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(asyncio.wrap_future(host.engine.death), 10)
