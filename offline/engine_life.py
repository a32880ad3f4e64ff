"""A request's life on an engine in this process: what `router/life.py` is on workers, without any of their faults.

event loop ── EngineLife.run ──► EngineHost.add ──► device thread
event loop ◄── EngineLives.on_step, once a step ◄──────┘
"""

import asyncio
import logging
from collections.abc import Callable

from engine.errors import EngineStopped, RequestRefused
from engine.host import EngineHost
from engine.request import (
    ChoiceState,
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    RequestFailed,
    StepOutput,
    TokenOutput,
)
from pagewire.errors import Internal, InvalidArgument, PagewireError, Unavailable
from router import request as text_side
from router.generation import Generation
from router.placement import Placement, Worker
from router.request import Logprobs, Token, WorkerCall
from router.services import Services

_FINISH = {
    FinishReason.STOP: text_side.FinishReason.STOP,
    FinishReason.LENGTH: text_side.FinishReason.LENGTH,
    FinishReason.ABORT: text_side.FinishReason.ABORT,
}
WORKER_NAME = "local"

logger = logging.getLogger(__name__)


class EngineLives:
    """Everybody who runs on one engine; `start` makes lives for a pipeline, `on_step` belongs to the host."""

    def __init__(self) -> None:
        self.host: EngineHost[None] | None = None
        self._lives: dict[str, EngineLife] = {}

    async def all_gone(self) -> None:
        """Returns when nobody runs any more; for after the engine's end, which fails them all."""
        await asyncio.gather(*(life.gone.wait() for life in list(self._lives.values())))

    def start(self, services: Services, call: WorkerCall, generation: Generation, deadline: float) -> "EngineLife":
        """As `Life`'s constructor. The deadline is watched by the pipeline."""
        if self.host is None:
            raise Unavailable("the engine does not run")
        return EngineLife(self.host, self._lives, call, generation, services.clock)

    def on_step(self, step: StepOutput, prepared: None) -> None:
        """Hands a step's output to its requests."""
        for request_id, num_cached_tokens in step.cached:
            if (life := self._lives.get(request_id)) is not None:
                life.begun(num_cached_tokens)
        for token in step.tokens:
            if (life := self._lives.get(token.request_id)) is not None:
                life.token(token)
        for found in step.prompt_logprobs:
            if (life := self._lives.get(found.request_id)) is not None:
                life.prompt_logprobs(found)
        for failed in step.failed:
            if (life := self._lives.get(failed.request_id)) is not None:
                life.fail(_error(failed))


class EngineLife:
    """`run` once. Fields are those of `Life`; there is nothing to migrate to."""

    def __init__(
        self,
        host: EngineHost[None],
        lives: "dict[str, EngineLife]",
        call: WorkerCall,
        generation: Generation,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._lives = lives
        self._call = call
        self._generation = generation
        self._clock = clock
        self._ended = asyncio.Event()
        self.gone = asyncio.Event()
        self._error: Exception | None = None
        self.num_failed_prefills = 0
        self.num_migrations = 0
        self.num_class_changes = 0
        self.num_cached_tokens = 0
        self.accepted_at: float | None = None
        self.first_token_at: float | None = None
        self.placement: Placement | None = None
        self.prefilled_by = WORKER_NAME
        self.decoded_by = WORKER_NAME
        generation.on_finished(self._ended.set)

    def start(self) -> None:
        """Nothing yet: `run` adds it to the engine."""

    async def stop(self) -> None:
        """`run` leaves nothing behind."""

    async def run(self) -> None:
        """Returns when every choice is finished; raises PagewireError. Whatever happens, nothing keeps running."""
        call = self._call
        label, engine = call.adapter, self._host.engine
        request = EngineRequest(
            call.request_id,
            call.prompt_token_ids,
            call.sampling,
            cache_salt=call.cache_salt,
            # A step of a beam search goes on from where its beams are.
            choices=tuple(
                ChoiceState(number, choice.output_token_ids, choice.finished)
                for number, choice in self._generation.so_far().items()
            ),
            priority=call.priority,
            adapter=None if label is None else engine.find_adapter(label.name, label.digest, label.generation),
        )
        self._lives[call.request_id] = self
        try:
            self._host.add(request)
            await self._ended.wait()
            if self._error is not None:
                raise self._error
        except RequestRefused as error:
            value = None if error.value == "" else error.value
            raise InvalidArgument(f"request.{error.field}", value, error.description) from None
        except EngineStopped as error:
            raise Unavailable(str(error)) from None
        finally:
            del self._lives[call.request_id]
            self._host.abort(call.request_id)
            self.gone.set()

    def worker_gone(self, is_alive: Callable[[Worker], bool]) -> None:
        """The engine is this process."""

    def log(self, level: int, message: str, **more: object) -> None:
        """One line about this request."""
        logger.log(level, "request %s: %s", self._call.request_id, message, extra=more)

    def begun(self, num_cached_tokens: int) -> None:
        """The scheduler took it up; after a preemption once more, which doesn't count."""
        if self.accepted_at is None:
            self.accepted_at = self._clock()
            self.num_cached_tokens = num_cached_tokens

    def token(self, token: TokenOutput) -> None:
        """One token."""
        if self.first_token_at is None:
            self.first_token_at = self._clock()
        logprobs = token.logprobs
        try:
            self._generation.accept(
                Token(
                    token.choice,
                    token.index,
                    token.token_id,
                    None if logprobs is None else Logprobs(logprobs.logprob, logprobs.rank, logprobs.top),
                    None if token.finish_reason is None else _FINISH[token.finish_reason],
                )
            )
        except Exception as bug:
            # It must end this request, not those that share the step.
            self.fail(bug)

    def prompt_logprobs(self, found: PromptLogprobs) -> None:
        """Log-probabilities of some of the prompt's tokens."""
        entries = [Logprobs(each.logprob, each.rank, each.top) for each in found.entries]
        self._generation.accept_prompt_logprobs(found.start, entries)

    def fail(self, error: PagewireError | Exception) -> None:
        """Ends it with an error."""
        self._error = error
        self._ended.set()


def _error(failed: RequestFailed) -> PagewireError:
    if failed.field:
        return InvalidArgument(f"request.{failed.field}", None, failed.message)
    return Internal(failed.message, error_id=failed.error_id)
