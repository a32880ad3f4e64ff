"""The step loop: one thread, one queue; idle costs nothing, failures stay with their requests, stop leaves nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine.engine import Engine
from engine.errors import EngineDied, EngineStopped, RequestRefused
from engine.loop import EngineLoop
from engine.request import AdoptedKv, EngineRequest, StepOutput
from pagewire.sampling import SamplingParams
from tests.engine.fake_engine import fake_engine
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import expected_outputs, prompt_of

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


class Collector:
    """Keeps what was delivered and lets the test wait for it."""

    def __init__(self) -> None:
        self.steps: list[StepOutput] = []
        self.threads: set[str] = set()
        self._arrived = threading.Condition()

    def __call__(self, output: StepOutput) -> None:
        with self._arrived:
            self.steps.append(output)
            self.threads.add(threading.current_thread().name)
            self._arrived.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._arrived:
            assert self._arrived.wait_for(condition, timeout=60), "nothing came"

    def tokens(self, request_id: str) -> list[int]:
        return [t.token_id for step in list(self.steps) for t in step.tokens if t.request_id == request_id]

    def ended(self, request_id: str) -> bool:
        return any(t.request_id == request_id and t.finish_reason for step in self.steps for t in step.tokens)

    def failures(self) -> dict[str, str]:
        return {failed.request_id: failed.message for step in list(self.steps) for failed in step.failed}


@pytest.fixture
def parts() -> Iterator[tuple[Engine, FakeRunner, EngineLoop, Collector]]:
    engine, runner = fake_engine()
    collector = Collector()
    loop = EngineLoop(engine, collector)
    loop.start()
    yield engine, runner, loop, collector
    loop.stop()
    assert engine.kv_cache.num_referenced == 0
    engine.scheduler.check_integrity()
    engine.close()


Parts = tuple[Engine, FakeRunner, EngineLoop, Collector]


def test_tokens_come_on_the_device_thread(parts: Parts) -> None:
    engine, _, loop, collector = parts
    request = EngineRequest("r", tuple(prompt_of(7)), SamplingParams(max_tokens=6))
    loop.add(request)
    collector.wait_for(lambda: collector.ended("r"))
    assert collector.tokens("r") == expected_outputs(request, engine.max_model_len)[0][0]
    assert collector.threads == {"pagewire-engine"}


def test_idle_uses_no_cpu_and_wakes_at_once(parts: Parts) -> None:
    _, _, loop, collector = parts
    assert loop.call(threading.get_native_id).exception(5) is not None  # takes no engine: its error is its caller's
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.2
    started = time.monotonic()
    loop.add(EngineRequest("r", (5,), SamplingParams(max_tokens=1)))
    collector.wait_for(lambda: collector.ended("r"))
    assert time.monotonic() - started < 20


def test_refusals_come_at_once_and_adopted_blocks_go_back(parts: Parts) -> None:
    engine, _, loop, _ = parts
    blocks = engine.kv_cache.allocate(2)
    assert blocks is not None
    request = EngineRequest("r", (5,) * 40, LONG, adopted=AdoptedKv(tuple(blocks), 8))
    with pytest.raises(RequestRefused, match="40 tokens leave no room"):
        loop.add(request)
    assert engine.kv_cache.num_referenced == 0


def test_a_doubled_id_is_refused_queued_or_running(parts: Parts) -> None:
    _, _, loop, collector = parts
    gate, added, second_gate = threading.Event(), threading.Event(), threading.Event()
    loop.call(lambda _: gate.wait(60))
    request = EngineRequest("r", (5, 6), SamplingParams(max_tokens=8, ignore_eos=True))
    loop.add(request)
    with pytest.raises(RequestRefused, match="'r' is in use already"):
        loop.add(request)
    loop.call(lambda _: (added.set(), second_gate.wait(60)))
    gate.set()
    assert added.wait(60)
    with pytest.raises(RequestRefused, match="'r' is in use already"):
        loop.add(request)
    second_gate.set()
    collector.wait_for(lambda: collector.ended("r"))
    assert len(collector.tokens("r")) == 8
    assert not collector.failures()


def test_abort_between_steps_tells_that_the_engine_is_idle(parts: Parts) -> None:
    engine, runner, loop, collector = parts
    loop.add(EngineRequest("r", (5, 6), LONG))
    collector.wait_for(lambda: bool(collector.tokens("r")))
    loop.abort("r")
    loop.abort("unknown")
    loop.call(lambda _: None).result(10)
    assert not engine.has_work
    assert collector.ended("r") or collector.steps[-1].load.num_running == 0
    assert collector.steps[-1].load.num_free_blocks == engine.num_blocks
    num_steps = len(runner.steps)
    loop.call(lambda _: None).result(10)
    assert len(runner.steps) == num_steps


def test_call_returns_results_and_errors(parts: Parts) -> None:
    engine, _, loop, _ = parts
    assert loop.call(lambda own: own is engine).result(10)
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda _: 1 / 0).result(10)
    assert loop.call(lambda _: threading.current_thread().name).result(10) == "pagewire-engine"


def test_a_failing_step_fails_its_requests_and_the_loop_goes_on(parts: Parts) -> None:
    _, runner, loop, collector = parts
    runner.fail_next = "device on fire"
    loop.add(EngineRequest("bad", (5, 6), LONG))
    collector.wait_for(lambda: bool(collector.failures()))
    assert collector.failures() == {"bad": "RuntimeError: device on fire"}
    loop.add(EngineRequest("good", (5, 6), SamplingParams(max_tokens=3, ignore_eos=True)))
    collector.wait_for(lambda: collector.ended("good"))


def test_a_lost_output_fails_its_requests_and_the_loop_goes_on() -> None:
    """They would wait for ever: nobody can say which of their tokens came."""
    engine, _ = fake_engine()
    collector, broken = Collector(), [True]

    def deliver(output: StepOutput) -> None:
        if (output.tokens or output.held) and broken:
            broken.clear()
            raise RuntimeError("receiver is broken")
        collector(output)

    loop = EngineLoop(engine, deliver)
    loop.start()
    both = threading.Event()
    loop.call(lambda _: both.wait(60))
    loop.add(EngineRequest("r", (5, 6), LONG))
    loop.add(EngineRequest("p", (7, 8, 9, 10, 11), SamplingParams(), prefill_only=True))
    both.set()
    collector.wait_for(lambda: len(collector.failures()) == 2)
    assert collector.failures() == dict.fromkeys("pr", "its output was lost: RuntimeError: receiver is broken")
    loop.add(EngineRequest("good", (5, 6), SamplingParams(max_tokens=3, ignore_eos=True)))
    collector.wait_for(lambda: collector.ended("good"))
    loop.stop()
    assert engine.kv_cache.num_referenced == 0
    assert loop.error is None
    engine.close()


def test_fail_tells_those_too_that_have_ended(parts: Parts) -> None:
    engine, _, loop, collector = parts
    loop.add(EngineRequest("ended", (5, 6), SamplingParams(max_tokens=1)))
    collector.wait_for(lambda: collector.ended("ended"))
    loop.add(EngineRequest("runs", (5, 6), LONG))
    loop.fail(["ended", "runs"], "lost")
    collector.wait_for(lambda: len(collector.failures()) == 2)
    assert collector.failures() == {"ended": "lost", "runs": "lost"}
    assert not engine.has_work


@pytest.mark.parametrize("end", [RuntimeError("books are broken"), SystemExit(0)])
def test_a_thread_that_cannot_go_on_says_so(monkeypatch: pytest.MonkeyPatch, end: BaseException) -> None:
    engine, runner = fake_engine()
    collector = Collector()
    loop = EngineLoop(engine, collector)

    def fail_step(message: str) -> StepOutput:
        raise end

    monkeypatch.setattr(engine, "fail_step", fail_step)
    runner.fail_next = "device on fire"
    loop.add(EngineRequest("r", (5, 6), LONG))
    loop.start()
    error = engine.death.exception(10)
    assert isinstance(error, Exception)
    assert str(end) in str(error)
    loop.stop()
    assert loop.error is end
    assert collector.failures() == {"r": "the engine has stopped"}
    with pytest.raises(EngineStopped):
        loop.add(EngineRequest("s", (5, 6), LONG))
    assert engine.kv_cache.num_referenced == 0
    engine.close()


def test_an_engine_that_has_died_ends_the_loop_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one step's requests fail, as after any other exception."""
    engine, _ = fake_engine()
    collector = Collector()
    loop = EngineLoop(engine, collector)

    def step() -> StepOutput:
        raise EngineDied("rank 1 has died")

    monkeypatch.setattr(engine, "step", step)
    loop.add(EngineRequest("r", (5, 6), LONG))
    loop.start()
    assert isinstance(engine.death.exception(10), EngineDied)
    loop.stop()
    assert collector.failures() == {"r": "the engine has died: rank 1 has died"}
    with pytest.raises(EngineStopped):
        loop.add(EngineRequest("s", (5, 6), LONG))
    engine.close()


def test_a_step_that_hangs_is_given_up_when_the_loop_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another rank has stopped in its middle."""
    engine, _ = fake_engine()
    collector = Collector()
    entered, given_up = threading.Event(), threading.Event()

    def hang() -> StepOutput:
        entered.set()
        assert given_up.wait(20.0)
        raise EngineDied("rank 1 has been killed")

    monkeypatch.setattr("engine.loop.LAST_STEP_SECONDS", 0.05)
    monkeypatch.setattr(engine, "step", hang)
    monkeypatch.setattr(engine, "give_up_step", given_up.set)
    loop = EngineLoop(engine, collector)
    loop.start()
    loop.add(EngineRequest("r", (5, 6), LONG))
    assert entered.wait(5.0)
    loop.stop()
    assert given_up.is_set()
    engine.close()


def test_a_stalled_engine_waits_and_goes_on_when_blocks_come_back(parts: Parts) -> None:
    engine, runner, loop, collector = parts
    held = engine.kv_cache.allocate(16)
    assert held is not None
    loop.add(EngineRequest("r", (5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=True)))
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.25
    assert not runner.steps
    engine.kv_cache.release(held)
    collector.wait_for(lambda: collector.ended("r"))


def test_stop_fails_what_runs_and_what_waits_in_the_queue() -> None:
    engine, _ = fake_engine()
    collector = Collector()
    loop = EngineLoop(engine, collector)
    loop.start()
    gate, entered = threading.Event(), threading.Event()
    loop.call(lambda _: (entered.set(), gate.wait(60)))
    assert entered.wait(60)
    loop.add(EngineRequest("r", (5, 6), LONG))
    assert loop.call(lambda _: None).cancel()  # whoever asked has given up; that must not break the rest
    late = loop.call(lambda _: "ran")
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    while not loop._stopping:
        time.sleep(0.001)
    gate.set()
    stopper.join(60)
    assert collector.failures() == {"r": "the engine has stopped"}
    assert isinstance(late.exception(10), EngineStopped)
    assert engine.kv_cache.num_referenced == 0
    loop.abort("r")
    loop.stop()
    with pytest.raises(EngineStopped):
        loop.call(lambda _: None)
    blocks = engine.kv_cache.allocate(1)
    assert blocks is not None
    with pytest.raises(EngineStopped):
        loop.add(replace(EngineRequest("s", (5, 6), LONG), adopted=AdoptedKv(tuple(blocks), 2)))
    assert engine.kv_cache.num_referenced == 0
    engine.close()


def test_stop_before_start() -> None:
    engine, _ = fake_engine()
    EngineLoop(engine, Collector()).stop()
    engine.close()
