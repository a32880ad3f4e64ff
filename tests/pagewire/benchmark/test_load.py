"""The load generator against a backend that a test scripts: when it sends, how much at a time, what it notes."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from pagewire.benchmark.backend import Delta, SendError, Served, Usage
from pagewire.benchmark.datasets import Chat, Sample
from pagewire.benchmark.load import Load
from pagewire.benchmark.options import ServeBenchOptions
from pagewire.benchmark.serve import _warm_up
from pagewire.cli.bench import repeat_flags


class Scripted:
    """Answers when `gate` opens; counts who is inside. A prompt "fail" or "bug" fails after its first token."""

    def __init__(self, full_at: int = 0) -> None:
        """`full` is set when so many are inside at a time."""
        self.gate = asyncio.Event()
        self.full = asyncio.Event()
        self._full_at = full_at
        self.inside = 0
        self.peak = 0
        self.request_ids: list[str] = []

    async def open(self) -> Served:
        return Served("m")

    async def stream(self, sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        self.request_ids.append(request_id)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        if self.inside == self._full_at:
            self.full.set()
        try:
            await asyncio.sleep(0)
            yield Delta(has_tokens=True, text="a")
            if sample.prompt == "fail":
                raise SendError("UNAVAILABLE", "gone")
            if sample.prompt == "bug":
                raise ZeroDivisionError("a bug")
            await self.gate.wait()
            yield Delta(has_tokens=True, text="b")
            yield Delta(usage=Usage(5, sample.output_len, 3))
        finally:
            self.inside -= 1

    async def close(self) -> None: ...


class Clock:
    """Time that passes when somebody sleeps, or when a test says so. Sleepers wake `late` seconds late."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 0.0
        self._late = late

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds + self._late


def load(backend: Scripted, prompts: list[str], due: list[float], clock: Clock, **more: object) -> Load:
    samples = [Sample(prompt, 4) for prompt in prompts]
    return Load(backend, samples, due, clock=clock, sleep=clock.sleep, **more)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_outcomes_come_in_the_order_of_arrival() -> None:
    backend = Scripted()
    backend.gate.set()
    work = load(backend, ["x", "fail", "x"], [0.0, 0.02, 0.05], Clock(), request_id_prefix="p-")
    await work.run()
    assert backend.request_ids == ["p-0", "p-1", "p-2"]
    good, failed, last = work.outcomes
    assert (good.text, good.num_prompt_tokens, good.num_output_tokens, good.num_cached_tokens) == ("ab", 5, 4, 3)
    assert len(good.token_times) == 2
    assert (failed.code, failed.error, failed.text) == ("UNAVAILABLE", "gone", "a")
    assert last.sent_at == 0.05
    assert all(o.arrived_at <= o.sent_at <= o.token_times[0] <= o.ended_at for o in work.outcomes)


async def test_max_concurrency_holds_back_and_counts_as_queue_time() -> None:
    backend, clock = Scripted(), Clock()
    work = load(backend, ["x"] * 6, [0.0] * 6, clock, max_concurrency=2)
    running = asyncio.ensure_future(work.run())
    await until(lambda: backend.inside == 2)
    clock.now = 5.0
    backend.gate.set()
    await running
    assert backend.peak == 2
    assert [outcome.queue_time for outcome in work.outcomes] == [0.0, 0.0, 5.0, 5.0, 5.0, 5.0]
    assert [outcome.latency for outcome in work.outcomes] == [5.0, 5.0, 0.0, 0.0, 0.0, 0.0]


async def test_the_rate_does_not_wait_for_answers() -> None:
    backend = Scripted(full_at=5)
    work = load(backend, ["x"] * 5, [0.0, 0.01, 0.02, 0.03, 0.04], Clock())
    running = asyncio.ensure_future(work.run())
    await asyncio.wait_for(backend.full.wait(), 30)
    backend.gate.set()
    await running


async def test_a_request_arrives_when_it_is_due_and_not_when_the_sender_gets_to_it() -> None:
    backend = Scripted()
    backend.gate.set()
    work = load(backend, ["x"] * 3, [1.0, 1.5, 4.0], Clock(late=2.0))
    await work.run()
    assert [outcome.arrived_at for outcome in work.outcomes] == [1.0, 1.5, 4.0]
    assert [outcome.queue_time for outcome in work.outcomes] == [2.0, 1.5, 2.0]


async def test_a_failure_that_nobody_thought_of_is_one_of_the_outcomes() -> None:
    backend = Scripted()
    backend.gate.set()
    work = load(backend, ["x", "bug", "x"], [0.0, 0.1, 0.2], Clock())
    await work.run()
    assert [outcome.code for outcome in work.outcomes] == ["", "ZeroDivisionError", ""]
    assert work.outcomes[1].error == "a bug"


async def test_warm_ups_send_the_first_sample_alone() -> None:
    """Others would be in the prefix cache when they are measured."""
    backend, sent = Scripted(), list[str | tuple[int, ...] | Chat]()
    backend.gate.set()
    stream = backend.stream

    def note(sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        sent.append(sample.prompt)
        return stream(sample, request_id)

    backend.stream = note  # type: ignore[method-assign]
    await _warm_up(backend, [Sample("first", 4), Sample("second", 4)], ServeBenchOptions(num_warmups=3))
    assert sent == ["first"] * 3


async def test_cancelled_it_keeps_what_ended() -> None:
    backend, one_ended, counts = Scripted(), asyncio.Event(), list[int]()
    clock = Clock()

    async def sleep(seconds: float) -> None:
        await (clock.sleep(seconds) if seconds < 1 else asyncio.Event().wait())

    samples = [Sample(prompt, 4) for prompt in ("x", "fail", "x")]
    work = Load(backend, samples, [0.0, 0.02, 100.0], clock=clock, sleep=sleep, on_tokens=counts.append,
                on_finished=one_ended.set)  # fmt: skip
    running = asyncio.ensure_future(work.run())
    await asyncio.wait_for(one_ended.wait(), 30)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert [outcome.code for outcome in work.outcomes] == ["UNAVAILABLE"]
    assert backend.inside == 0
    assert counts == [1, 1]


def test_flags_that_take_many_values() -> None:
    said = ["--goodput", "ttft:1", "tpot:2", "--seed", "3", "--metadata", "a=b", "c=d", "--report", "--goodput=e2el:4"]
    expected = ["--goodput", "ttft:1", "--goodput", "tpot:2", "--seed", "3", "--metadata", "a=b", "--metadata", "c=d",
                "--report", "--goodput=e2el:4"]  # fmt: skip
    assert list(repeat_flags(said, {"--goodput", "--metadata"})) == expected
