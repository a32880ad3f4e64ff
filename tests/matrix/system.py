"""Real workers on real sockets and the router's own pipeline, in one process; and the engine alone, to compare with."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc

from decode_svc.app import DecodeApp
from engine.engine import Engine
from engine.request import EngineRequest, StepOutput, TokenLogprobs
from pagewire import rpc
from pagewire.config import WorkerConfig
from pagewire.sampling import SamplingParams
from prefill_svc.app import PrefillApp
from router.generation import Generation
from router.model import ModelFacts
from router.observer import RequestObserver
from router.pipeline import Pipeline
from router.placement import Demand, Limits, NoWorker, Placement, Worker
from router.prompt_keys import KeySpace
from router.request import GenerateCall, Piece, PromptLogprobs, Token
from tests.decode_svc.harness import BLOCK_SIZE, NUM_BLOCKS, make_engine

STEP_SECONDS = 0.004  # a tiny model would be done before anybody could disturb it


@dataclass
class Output:
    """One choice, on whichever path."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[float, int, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    finish: str = ""


@dataclass
class Result:
    """A whole request."""

    choices: dict[int, Output] = field(default_factory=dict)
    prompt_logprobs: list[tuple[float, int, tuple[tuple[int, float], ...]]] = field(default_factory=list)

    def choice(self, number: int) -> Output:
        return self.choices.setdefault(number, Output())


def _plain(found: Any) -> tuple[float, int, tuple[tuple[int, float], ...]]:
    """As it looks behind float32 wires."""
    import numpy as np

    top = tuple((token_id, float(np.float32(value))) for token_id, value in found.top)
    return float(np.float32(found.logprob)), found.rank, top


def in_one_process(
    engine: Engine,
    work: dict[str, tuple[list[int], SamplingParams]],
    *,
    adapter: str = "",
    watch: Callable[[StepOutput], object] = lambda step: None,
) -> dict[str, Result]:
    """All of it at once, by name; with `adapter` unless it is empty. `watch` is shown every step's output."""
    loaded = engine.find_adapter(adapter) if adapter else None
    results = {name: Result() for name in work}
    prompt_logprobs: dict[str, dict[int, TokenLogprobs]] = {name: {} for name in work}
    for name, (prompt, params) in work.items():
        engine.add(EngineRequest(name, tuple(prompt), params, adapter=loaded))
    while engine.has_work:
        step = engine.step()
        watch(step)
        assert not step.failed, step.failed
        for found in step.prompt_logprobs:
            for position, entry in enumerate(found.entries, found.start):
                assert prompt_logprobs[found.request_id].setdefault(position, entry) == entry
        for token in step.tokens:
            output = results[token.request_id].choice(token.choice)
            output.token_ids.append(token.token_id)
            if token.logprobs is not None:
                output.logprobs.append(_plain(token.logprobs))
            if token.finish_reason is not None:
                output.finish = token.finish_reason.name
        engine.take_events()
        if engine.is_stalled and engine.tiers is not None:
            engine.tiers.wait_for_load(0.01)
    for name, found_by_position in prompt_logprobs.items():
        results[name].prompt_logprobs = [_plain(found_by_position[p]) for p in sorted(found_by_position)]
    return results


class _Slow:
    """A runner that takes its time."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine._runner
        engine._runner = self  # type: ignore[assignment]

    def execute(self, schedule: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return self._runner.execute(schedule)


class _Placer:
    """Takes workers in turn; D never prefills while a P is left."""

    def __init__(self, prefills: list[PrefillApp], decodes: list[DecodeApp]) -> None:
        self.prefills, self.decodes = map(_workers, (prefills, decodes))
        self._num_placed = 0
        self._channels: dict[str, grpc.aio.Channel] = {}

    def limits(self) -> Limits:
        return Limits(NUM_BLOCKS * BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE, BLOCK_SIZE)

    def place(self, demand: Demand, avoid: Set[tuple[str, int]] = frozenset()) -> Placement:
        self._num_placed += 1
        decodes = [worker for worker in self.decodes if worker.process not in avoid]
        prefills = [worker for worker in self.prefills if worker.process not in avoid]
        if not decodes:
            raise NoWorker("all are avoided", avoided=True)
        at = self._num_placed
        prefill = prefills[at % len(prefills)] if prefills and demand.prefill else None
        return Placement(prefill, decodes[at % len(decodes)])

    def explain(self, demand: Demand, open_breakers: Set[tuple[str, int]] = frozenset()) -> NoReturn:
        raise NotImplementedError("it has no reasons")

    def key_spaces(self) -> list[KeySpace]:
        return []

    def is_alive(self, worker: Worker) -> bool:
        return True

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        if worker.endpoint not in self._channels:
            self._channels[worker.endpoint] = rpc.channel(worker.endpoint)
        return self._channels[worker.endpoint]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def _workers(apps: list[Any]) -> list[Worker]:
    facts = [app.description for app in apps]
    return [Worker(d.worker_id, d.incarnation, d.endpoint, d.fingerprint.numerics_class) for d in facts]


class _Migrations(RequestObserver):
    num = 0

    def faults(self, *, num_migrations: int, num_class_changes: int, num_failed_prefills: int) -> None:
        self.num += num_migrations


async def result_of(pipeline: Pipeline, call: GenerateCall) -> Result:
    result, num_tokens = Result(), 0
    async for output in pipeline.generate(call):
        if isinstance(output, PromptLogprobs):
            assert not num_tokens
            assert output.start == len(result.prompt_logprobs) + 1
            result.prompt_logprobs += map(_plain, output.entries)
        elif isinstance(output, Piece):
            choice = result.choice(output.choice)
            assert output.index == len(choice.token_ids)
            choice.token_ids += output.token_ids
            choice.text += output.text
            choice.logprobs += map(_plain, output.logprobs)
            if output.finish_reason is not None:
                choice.finish = output.finish_reason.name
            num_tokens += len(output.token_ids)
    return result


class System:
    """`generate` runs a call; with `break_after` tokens its decode worker's session is broken once."""

    def __init__(self, pipeline: Pipeline, observer: _Migrations, engines: Sequence[Engine]) -> None:
        self.pipeline = pipeline
        self.engines = engines
        self._observer = observer

    @property
    def num_migrations(self) -> int:
        return self._observer.num

    async def generate(self, call: GenerateCall, *, break_after: int | None = None) -> Result:
        if break_after is None:
            return await result_of(self.pipeline, call)
        encoder, breaks = self.pipeline._encoder, list[asyncio.Task[None]]()
        make = encoder.generation

        def generation(*arguments: Any) -> Generation:
            made = make(*arguments)
            accept = made.accept

            def accept_and_break(token: Token) -> None:
                accept(token)
                if made.num_completion_tokens >= break_after and not breaks:
                    breaks.append(asyncio.create_task(self.break_sessions()))

            made.accept = accept_and_break  # type: ignore[method-assign]
            return made

        encoder.generation = generation  # type: ignore[method-assign]
        try:
            return await result_of(self.pipeline, call)
        finally:
            encoder.generation = make  # type: ignore[method-assign]
            await asyncio.gather(*breaks)

    async def break_sessions(self) -> None:
        """As if the network had cut every decode stream."""
        sessions = self.pipeline._services.sessions
        await asyncio.gather(*(session.close() for session in list(sessions._sessions.values())))


@asynccontextmanager
async def system(model: Path, *, num_prefill: int, num_decode: int, **options: Any) -> AsyncIterator[System]:
    """All workers' engines have `options`. Checks at the end that no worker holds anything."""
    engines, prefills, decodes = [], [], []
    for number in range(num_prefill + num_decode):
        engine = make_engine(model, **options)
        engines.append(engine)
        if number < num_prefill:
            prefills.append(PrefillApp(WorkerConfig(role="prefill", engine=engine.options), engine))
        else:
            _Slow(engine)
            decodes.append(DecodeApp(WorkerConfig(role="decode", engine=engine.options), engine))
    for app in (*prefills, *decodes):
        await app.start()
        await app.server.server.start()
    placer, observer = _Placer(prefills, decodes), _Migrations()
    labels = {view.label.name: view.label for view in decodes[0].worker.adapters.views()}
    pipeline = Pipeline(ModelFacts.load(model), placer, observer=observer, adapters=lambda: labels)
    pipeline.start()
    try:
        yield System(pipeline, observer, engines)
        deadline = time.monotonic() + 60
        while any(engine.kv_cache.num_referenced for engine in engines):
            assert time.monotonic() < deadline, "blocks are still referenced"
            await asyncio.sleep(0.02)
    finally:
        await pipeline.drain()
        await pipeline.close()
        await placer.close()
        for app in (*decodes, *prefills):
            await app.stop()
        for engine in engines:
            engine.close()
