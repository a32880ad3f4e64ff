"""A router pipeline over scripted workers, with a placer that takes the first worker that is left."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pagewire import rpc
from pagewire.sampling import SamplingParams
from router.backend import Output, Started
from router.explanation import Explanation
from router.model import ModelFacts
from router.pipeline import Pipeline
from router.placement import Demand, Limits, NoWorker, Placement, Worker
from router.prompt_keys import KeySpace
from router.request import FinishReason, GenerateCall, Piece, Summary, TextOptions, TokenPrompt
from router.services import RetryLimits
from tests.router.scripted_workers import BLOCK_SIZE, ScriptedDecode, ScriptedPrefill, expected
from tests.tiny_tokenizers import byte_level, write_model_directory

PROMPT = (10, 11, 12, 13, 14, 15)
QUICK = RetryLimits(avoid_seconds=0.1, wait_seconds=0.6, poll_seconds=0.01)


class StaticPlacer:
    """The first prefill and the first decode worker that are alive and not avoided."""

    def __init__(self, prefills: Sequence[ScriptedPrefill], decodes: Sequence[ScriptedDecode]) -> None:
        self.prefills = list(prefills)
        self.decodes = list(decodes)
        self.lost: set[str] = set()
        self.demands: list[Demand] = []
        self.spaces: list[KeySpace] = []
        self._channels: dict[str, grpc.aio.Channel] = {}

    def limits(self) -> Limits | None:
        alive = [d for d in self.decodes if d.worker_id not in self.lost]
        return Limits(max(d.max_model_len for d in alive), 64 * BLOCK_SIZE, BLOCK_SIZE) if alive else None

    def place(self, demand: Demand, avoid: Set[tuple[str, int]] = frozenset()) -> Placement:
        self.demands.append(demand)
        alive = [d.worker for d in self.decodes if d.worker_id not in self.lost]
        decodes = [worker for worker in alive if worker.process not in avoid]
        if not decodes:
            raise NoWorker("no decode worker is alive", avoided=bool(alive))
        prefills = [p.worker for p in self.prefills if p.worker_id not in self.lost and p.worker.process not in avoid]
        prefill = prefills[0] if prefills and demand.prefill else None
        return Placement(prefill, decodes[0], num_expected_tokens=len(demand.prompt_token_ids) - 1)

    def explain(self, demand: Demand, open_breakers: Set[tuple[str, int]] = frozenset()) -> Explanation:
        raise NotImplementedError("it has no reasons")

    def key_spaces(self) -> list[KeySpace]:
        return self.spaces

    def is_alive(self, worker: Worker) -> bool:
        everybody = [w.worker.process for w in (*self.prefills, *self.decodes) if w.worker_id not in self.lost]
        return worker.process in everybody

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        if worker.endpoint not in self._channels:
            self._channels[worker.endpoint] = rpc.channel(worker.endpoint)
        return self._channels[worker.endpoint]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


@dataclass(slots=True)
class Result:
    """A finished stream. `text` and the rest are by choice."""

    started: Started
    pieces: list[Piece]
    summary: Summary
    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    stop: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class System:
    """What a test works with."""

    pipeline: Pipeline
    placer: StaticPlacer
    prefills: list[ScriptedPrefill]
    decodes: list[ScriptedDecode]

    async def generate(
        self, call: GenerateCall | None = None, *, on_output: Callable[[Output], None] = lambda _: None, **sampling: Any
    ) -> Result:
        outputs = []
        async for output in self.pipeline.generate(call or a_call(**sampling)):
            outputs.append(output)
            on_output(output)
        return collect(outputs)


def a_call(*, prompt: Sequence[int] = PROMPT, text_options: TextOptions | None = None, **sampling: Any) -> GenerateCall:
    """A request for 8 tokens unless said otherwise."""
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return GenerateCall(TokenPrompt(tuple(prompt)), params, text_options or TextOptions())


def collect(outputs: Sequence[Output]) -> Result:
    """Checks the order of the stream and joins its pieces."""
    started, *pieces, summary = outputs
    assert isinstance(started, Started)
    assert isinstance(summary, Summary)
    result = Result(started, [], summary)
    for piece in pieces:
        assert isinstance(piece, Piece)
        ids = result.token_ids.setdefault(piece.choice, [])
        assert piece.index == len(ids), "a gap or a repetition"
        assert piece.choice not in result.finish, "output after the end"
        ids += piece.token_ids
        result.text[piece.choice] = result.text.get(piece.choice, "") + piece.text
        if piece.finish_reason is not None:
            result.finish[piece.choice] = piece.finish_reason
            result.stop[piece.choice] = piece.stop_reason
        result.pieces.append(piece)
    assert sum(map(len, result.token_ids.values())) == summary.completion_tokens
    return result


@dataclass(slots=True)
class Heard:
    """Says when the client has heard this many tokens of all choices together."""

    num_tokens: int
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, output: Output) -> None:
        self.num_tokens -= len(output.token_ids) if isinstance(output, Piece) else 0
        if self.num_tokens <= 0:
            self.event.set()


def wanted(num_tokens: int, *, prompt: Sequence[int] = PROMPT, choice: int = 0) -> list[int]:
    """The tokens of a choice when nothing disturbs it."""
    return [expected(prompt, choice, index) for index in range(num_tokens)]


async def eventually(condition: Callable[[], bool | Awaitable[bool]], *, seconds: float = 5.0) -> None:
    """Waits until it is true; TimeoutError if it does not become so."""
    async with asyncio.timeout(seconds):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.01)


def released(prefill: ScriptedPrefill) -> list[bool]:
    """For each ticket that was handed out, whether the router gave it up."""
    return [ticket.released for ticket in prefill.tickets.values()]


@asynccontextmanager
async def a_system(
    directory: Path,
    *,
    prefills: Sequence[ScriptedPrefill] = (),
    decodes: Sequence[ScriptedDecode] = (),
    **options: Any,
) -> AsyncIterator[System]:
    """Starts the workers and a pipeline; at the end nothing may be running on any worker."""
    for decode in decodes:
        decode.peers = prefills
    for worker in (*prefills, *decodes):
        await worker.start()
    model = ModelFacts.load(write_model_directory(directory / "tiny", byte_level(), vocab_size=300))
    placer = StaticPlacer(prefills, decodes)
    pipeline = Pipeline(model, placer, **{"retry_limits": QUICK, **options})
    pipeline.start()
    try:
        yield System(pipeline, placer, list(prefills), list(decodes))
    finally:
        await pipeline.drain()
        await pipeline.close()
        await placer.close()
        for worker in (*prefills, *decodes):
            await worker.kill()
            assert worker.num_running == 0
        for prefill in prefills:
            held = [t for t in prefill.tickets.values() if not (t.released or t.aborted or t.taken)]
            assert not held, "tickets that only their lease would end"
