"""One request's life at the router: admit, validate, tokenize, run on workers, stream, sum up."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from pagewire.errors import DeadlineExceeded, PagewireError, Unavailable
from pagewire.worker_view import AdapterLabel, TenantQueueSnapshot
from router.admission import Admission
from router.backend import Output, Started
from router.beam_run import BeamRun
from router.breaker import Breakers
from router.call_encoder import CallEncoder
from router.decode_session import DecodeSessions
from router.explanation import Explanation
from router.generation import Generation
from router.life import Life
from router.lives import Lives, StartLife, summary_of
from router.model import ModelFacts
from router.observer import RequestObserver
from router.placement import Demand, Placer
from router.ranking import ranking_of
from router.request import BeamSearch, GenerateCall, Prompt, PromptLogprobs, Summary, WorkerCall
from router.services import RetryLimits, Services
from router.validate import ANY_LENGTH, truncated, validate_call, validate_prompt

logger = logging.getLogger(__name__)

_LOST_PROMPT_LOGPROBS = "log-probabilities of the prompt were lost with the prefill worker"


class Pipeline:
    """Turns calls into streams of output. `start` before use, `drain` and `close` at the end.

    While `obstacle` gives an error, every request gets it.
    """

    def __init__(
        self,
        model: ModelFacts,
        placer: Placer,
        *,
        retry_limits: RetryLimits | None = None,
        request_timeout: float = 600.0,
        max_concurrent_requests: int = 1024,
        observer: RequestObserver | None = None,
        breakers: Breakers | None = None,
        obstacle: Callable[[], PagewireError | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        start_life: StartLife = Life,
        adapters: Callable[[], Mapping[str, AdapterLabel]] = dict,
    ) -> None:
        self.model = model
        self._placer = placer
        self._services = Services(
            placer, DecodeSessions(), retry_limits or RetryLimits(), clock, Breakers() if breakers is None else breakers
        )
        self._adapters = adapters
        self._encoder = CallEncoder(model, placer, adapters)
        self._observer = observer or RequestObserver()
        self._obstacle = obstacle
        self._timeout = request_timeout
        self._admission = Admission(max_concurrent_requests, self._observer, obstacle)
        self._lives = Lives(self._services, self._observer, self._out_of_time, start_life)

    @property
    def num_active(self) -> int:
        """Requests in flight."""
        return self._admission.num_active

    @property
    def draining(self) -> bool:
        """New requests are refused."""
        return self._admission.draining

    def by_tenant(self) -> tuple[TenantQueueSnapshot, ...]:
        """Requests in flight of each tenant that has some."""
        return self._admission.by_tenant()

    @property
    def adapters(self) -> Mapping[str, AdapterLabel]:
        """LoRA adapters that some worker can decode with now, by name."""
        return self._adapters()

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the model and the workers take now."""
        return self._encoder.max_model_len()

    @property
    def is_ready(self) -> bool:
        """True if some worker can serve now."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Why no worker can serve now; empty if one can."""
        if (obstacle := self._obstacle()) is not None:
            return obstacle.message
        return "no worker can serve now" if self._placer.limits() is None else ""

    def start(self) -> None:
        """Begins to watch for workers that vanish without a word."""
        self._lives.start()

    def start_drain(self) -> None:
        """Refuses new requests from now on."""
        self._admission.draining = True

    async def drain(self) -> None:
        """Refuses new requests and waits for those that run."""
        self.start_drain()
        await self._admission.wait_idle()

    async def close(self) -> None:
        """Ends everything. Requests that still run fail."""
        await self._lives.close()
        await asyncio.gather(*self._services.background, return_exceptions=True)
        await self._services.sessions.close()
        self._encoder.close()

    async def tokenize(
        self,
        prompt: Prompt | None,
        *,
        truncate_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        tenant: str | None = None,
    ) -> tuple[int, ...]:
        """Token ids as `generate` would have them, however many.

        For a tenant it is the first part of a `generate`: admitted, refused and ended by the deadline like one, and
        given up where the prompt no longer fits.
        """
        limit = self.max_model_len
        validate_prompt(prompt, self.model, max_model_len=limit if truncate_prompt_tokens is None else ANY_LENGTH)
        if prompt is None or tenant is None:
            token_ids = () if prompt is None else await self._encoder.prompts.encode(prompt)
        else:
            most = limit - 1 if truncate_prompt_tokens is None else None
            try:
                with self._admission.admitted(tenant):
                    async with asyncio.timeout(self._timeout):
                        token_ids = await self._encoder.prompts.encode(prompt, max_tokens=most)
            except TimeoutError:
                raise self._out_of_time() from None
        return truncated(token_ids, truncate_prompt_tokens, max_tokens, limit)

    async def resolve(self, call: GenerateCall) -> WorkerCall:
        """The request as a worker would get it. The errors are those of `generate`."""
        validate_call(call, self.model, max_model_len=self.max_model_len, adapters=self._encoder.adapters_for(call))
        return await self._encoder.worker_call(call)

    async def explain(self, call: GenerateCall) -> Explanation:
        """Where `generate` would send this now, and why. The errors are those of `generate`."""
        validate_call(call, self.model, max_model_len=self.max_model_len, adapters=self._encoder.adapters_for(call))
        worker_call = await self._encoder.worker_call(call)
        sampling = worker_call.sampling
        return self._services.explain(
            Demand(
                worker_call.prompt_token_ids,
                call.cache_salt,
                sampling.max_tokens or 1,
                sampling.n,
                keys=worker_call.keys,
                session_id=call.session_id,
                adapter=worker_call.adapter,
            )
        )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids that begin a text."""
        return await self._encoder.prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def generate(self, call: GenerateCall, *, seconds_left: float | None = None) -> AsyncGenerator[Output]:
        """Started, pieces, Summary; or a PagewireError. Closing the generator cancels everything at once.

        `seconds_left` is the client's deadline, if it has one; `request_timeout` bounds it.
        """
        with self._admission.admitted(call.tenant or call.cache_salt):
            self._observer.started()
            code, has_begun = "CANCELLED", False
            try:
                timeout = self._timeout if seconds_left is None else min(self._timeout, seconds_left)
                async with aclosing(self._generate(call, timeout)) as outputs:
                    async for output in outputs:
                        has_begun = True
                        yield output
                code = ""
            except Exception as error:
                code = error.code.name if isinstance(error, PagewireError) else "INTERNAL"
                if isinstance(error, PagewireError) and not has_begun:
                    self._observer.rejected(error)
                raise
            finally:
                if code:
                    self._observer.failed(code)
                self._observer.ended()

    async def _generate(self, call: GenerateCall, timeout: float) -> AsyncGenerator[Output]:
        arrived = self._services.clock()
        validate_call(call, self.model, max_model_len=self.max_model_len, adapters=self._encoder.adapters_for(call))
        try:
            async with asyncio.timeout(timeout):
                worker_call = await self._encoder.worker_call(call)
        except TimeoutError:
            raise self._out_of_time() from None
        num_prompt_tokens = len(worker_call.prompt_token_ids)
        logger.debug(
            "request %s (client's name %r): %d prompt tokens, %s",
            worker_call.request_id,
            call.client_request_id,
            num_prompt_tokens,
            worker_call.sampling,
        )
        if call.beam_search is not None:
            async for output in self._beams(call, call.beam_search, worker_call, arrived, timeout):
                yield output
            return
        generation = self._encoder.generation(call, worker_call)
        life = self._lives.begin(worker_call, generation, arrived + timeout)
        task = asyncio.create_task(self._lives.live(life, generation, arrived + timeout), name="request")
        try:
            yield Started(worker_call.request_id, worker_call.sampling.seed or 0, num_prompt_tokens)
            for found in await generation.take_prompt_logprobs(worker_call.prompt_token_ids):
                yield found
            ranking = ranking_of(call)
            last_output: dict[int, float] = {}
            while pieces := await generation.take():
                now = self._services.clock()
                for piece in pieces:
                    before = last_output.get(piece.choice)
                    self._observer.output(piece, None if before is None else now - before)
                    last_output[piece.choice] = now
                    if ranking is None:
                        yield piece
                    else:
                        ranking.add(piece)
            await task
            if generation.lacks_prompt_logprobs:
                raise Unavailable(_LOST_PROMPT_LOGPROBS)
            for piece in () if ranking is None else ranking.best():
                yield piece
            summary = summary_of(
                life, generation.num_completion_tokens, num_prompt_tokens, arrived, self._services.clock()
            )
            moved = life.num_migrations or life.num_failed_prefills
            self._observer.finished(summary, None if moved else life.placement)
            yield summary
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await life.stop()  # a task that is cancelled before its first step does nothing
            elif not task.cancelled():
                task.exception()  # has been looked at
            self._lives.count_faults(life)

    async def _beams(
        self, call: GenerateCall, search: BeamSearch, worker_call: WorkerCall, arrived: float, timeout: float
    ) -> AsyncGenerator[Output]:
        """Nothing comes before the search is over."""
        model, num_prompt_tokens = self.model, len(worker_call.prompt_token_ids)
        run = BeamRun(worker_call, search, model.tokenizer, model.eos_token_ids, call.text_options)
        # Of the first step, which has the prompt; lives and their output so far are not kept.
        first: list[tuple[Summary, list[PromptLogprobs]]] = []

        async def live(step: WorkerCall, generation: Generation) -> None:
            life = self._lives.begin(step, generation, arrived + timeout)
            try:
                await self._lives.live(life, generation, arrived + timeout)
            finally:
                self._lives.count_faults(life)
            if not first:
                if generation.lacks_prompt_logprobs:
                    raise Unavailable(_LOST_PROMPT_LOGPROBS)
                prompt = await generation.take_prompt_logprobs(step.prompt_token_ids)
                first.append((summary_of(life, 0, num_prompt_tokens, arrived, self._services.clock()), prompt))

        yield Started(worker_call.request_id, worker_call.sampling.seed or 0, num_prompt_tokens)
        await run.run(live)
        summary, prompt_logprobs = first[0]
        for found in prompt_logprobs:
            yield found
        pieces = run.pieces(call.sampling.n)
        for piece in pieces:
            self._observer.output(piece, None)
            yield piece
        summary = replace(
            summary,
            completion_tokens=sum(len(piece.token_ids) for piece in pieces),
            total_ms=1e3 * (self._services.clock() - arrived),
        )
        self._observer.finished(summary)
        yield summary

    def _out_of_time(self) -> DeadlineExceeded:
        message = (
            f"the request did not end within its deadline (its client's, or request_timeout = {self._timeout:g} s)"
        )
        return DeadlineExceeded(message)
