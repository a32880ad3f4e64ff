"""Sends samples when they are due and notes what comes back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from pagewire.benchmark.backend import Backend, SendError
from pagewire.benchmark.datasets import Sample
from pagewire.benchmark.outcome import Outcome


class Load:
    """One run. `clock` gives seconds since its start. Cancel `run` and `outcomes` has what ended before.

    Open loop: a request is due when `due` says so, however slow the server is; with `max_concurrency` it then waits for
    its turn, which counts as queue time and not as latency, as in vLLM. So does what this process itself is late.
    """

    def __init__(
        self,
        backend: Backend,
        samples: Sequence[Sample],
        due: Sequence[float],
        *,
        max_concurrency: int | None = None,
        request_id_prefix: str = "bench-",
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        on_tokens: Callable[[int], None] = lambda count: None,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._samples = samples
        self._due = due
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._prefix = request_id_prefix
        self._clock = clock
        self._sleep = sleep
        self._on_tokens = on_tokens
        self._on_finished = on_finished
        self._ended: dict[int, Outcome] = {}

    @property
    def outcomes(self) -> list[Outcome]:
        """Of all that ended, in the order in which they were due."""
        return [outcome for _, outcome in sorted(self._ended.items())]

    async def run(self) -> None:
        """Returns when all have ended. Cancelled, it cancels what runs and waits for it."""
        async with asyncio.TaskGroup() as group:
            for number, (sample, due) in enumerate(zip(self._samples, self._due, strict=True)):
                while (wait := due - self._clock()) > 0:
                    await self._sleep(wait)
                group.create_task(self._one(number, sample, due))

    async def _one(self, number: int, sample: Sample, due: float) -> None:
        async with self._slots or contextlib.nullcontext():
            outcome = Outcome(due, self._clock())
            await send(self._backend, sample, f"{self._prefix}{number}", outcome, self._clock, self._on_tokens)
        self._ended[number] = outcome
        self._on_finished()


async def send(
    backend: Backend,
    sample: Sample,
    request_id: str,
    outcome: Outcome,
    clock: Callable[[], float],
    on_tokens: Callable[[int], None] = lambda count: None,
) -> None:
    """One request; everything that is known of it goes into `outcome`, whatever was raised too.

    One request that fails in a way that nobody thought of must not cost the measurements of the others.
    """
    prompt = sample.prompt
    outcome.num_prompt_tokens = len(prompt) if isinstance(prompt, tuple) else 0
    pieces: list[str] = []
    try:
        async with contextlib.aclosing(backend.stream(sample, request_id)) as deltas:
            async for delta in deltas:
                if delta.has_tokens:
                    outcome.token_times.append(clock())
                    on_tokens(1)
                pieces.append(delta.text)
                if delta.usage is not None:
                    usage = delta.usage
                    outcome.num_prompt_tokens = usage.prompt_tokens or outcome.num_prompt_tokens
                    outcome.num_output_tokens = usage.output_tokens or 0
                    outcome.num_cached_tokens = usage.cached_tokens
    except SendError as error:
        outcome.code, outcome.error = error.code, error.message
    except Exception as error:
        outcome.code, outcome.error = type(error).__name__, str(error)
    outcome.ended_at = clock()
    outcome.text = "".join(pieces)
    outcome.num_output_tokens = outcome.num_output_tokens or len(outcome.token_times)
