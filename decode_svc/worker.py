"""The decode worker: takes requests, brings their KV in, runs them, and tells each router what came of them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from decode_svc.choices import shared_token_ids
from decode_svc.intake import Intake, Source
from decode_svc.outbox import Outbox
from engine.admission import open_branches
from engine.engine import Engine
from engine.errors import EngineStopped, RequestRefused
from engine.host import EngineHost
from engine.request import EngineRequest, RequestFailed, StepOutput
from pagewire.admission_queue import duplicate_request
from pagewire.errors import DeadlineExceeded, Internal, InvalidArgument, PagewireError, Unavailable
from pagewire.trace import log_fields
from pagewire.worker_view import PrefixSource
from transfer_svc.worker import KvWorker, WorkerSetup, refused

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has not ended. `open_choices` still bring tokens; `intake` runs until the engine has it."""

    request: EngineRequest
    outbox: Outbox
    handle: int
    open_choices: set[int]
    intake: asyncio.Task[None] | None = None
    accepted: bool = False
    num_fetched_tokens: int = 0
    num_passed_over_tokens: int = 0  # others are said to hold them, and nobody was asked
    deadline: asyncio.TimerHandle | None = None


class DecodeWorker(KvWorker):
    """Everything happens on one event loop. `fail_without_kv`: a request whose KV is lost is not computed here."""

    def __init__(self, engine: Engine, setup: WorkerSetup, *, fail_without_kv: bool = False) -> None:
        host: EngineHost[None] = EngineHost(engine, setup.metrics, prepare=lambda step: None, on_step=self._on_step)
        super().__init__(engine, setup, host)
        self._requests: dict[str, _Request] = {}
        self._fail_without_kv = fail_without_kv

    def _give_up(self) -> None:
        for request_id, state in list(self._requests.items()):
            state.outbox.fail(state.handle, Unavailable("this worker has stopped"))
            state.outbox.flush()
            self.cancel(request_id)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def submit(
        self,
        request: EngineRequest,
        source: Source | None,
        outbox: Outbox,
        handle: int,
        *,
        prefix_sources: Sequence[PrefixSource] = (),
        num_expected_tokens: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Admits a request or refuses it at once (PagewireError). Everything after that goes through the outbox.

        `prefix_sources` are said to hold leading blocks of it, for when the ticket's worker doesn't bring them.
        `num_expected_tokens`: as many leading ones the router thinks are there or can be fetched, beside what a ticket
        brings. It fails with DEADLINE_EXCEEDED if it has not ended after `timeout` seconds, whatever its state.
        """
        try:
            num_tokens = len(shared_token_ids(request))
            self._admit(request, num_tokens, num_expected_tokens if source is None else num_tokens)
        except PagewireError as error:
            self.metrics.rejected(error.rejection)
            raise
        state = _Request(request, outbox, handle, {choice for choice, _ in open_branches(request)})
        self._requests[request.request_id] = state
        if timeout is not None:
            loop = asyncio.get_running_loop()
            state.deadline = loop.call_later(timeout, self._out_of_time, state, timeout)
        if source is not None:
            state.intake = self._spawn(self._take_in(state, source, prefix_sources), f"intake-{request.request_id}")
        elif request.may_use_cache and self.fetcher.wants(prefix_sources):
            state.intake = self._spawn(self._fetch(state, prefix_sources), f"fetch-{request.request_id}")
        else:
            if request.may_use_cache:
                num_tokens = len(shared_token_ids(request))
                state.num_passed_over_tokens = self.fetcher.num_passed_over(prefix_sources, num_tokens)
            self._run(state, request)
            outbox.flush()
        self._host.announce()

    def _admit(self, request: EngineRequest, num_tokens: int, num_expected_tokens: int) -> None:
        if request.request_id in self._requests:
            raise duplicate_request(request.request_id)
        try:
            self._host.engine.check(request)
        except RequestRefused as error:
            raise refused(error) from None
        self._queue.enter(request.request_id, num_tokens, request.tenant, num_expected_tokens=num_expected_tokens)

    def cancel(self, request_id: str) -> None:
        """Ends a request in whatever state it is and frees everything; unknown ids are fine."""
        state = self._requests.get(request_id)
        if state is None:
            return
        self.metrics.requests_cancelled.inc()
        self._forget(state)
        self._abandon(state)

    def _abandon(self, state: _Request) -> None:
        if state.intake is not None:
            state.intake.cancel()
        else:
            self._host.abort(state.request.request_id)

    def _out_of_time(self, state: _Request, timeout: float) -> None:
        """Its router would have cancelled it, were it still there."""
        request = state.request
        self.metrics.deadlines_exceeded.inc()
        logger.warning("request %s is out of time: it had %.3f s", request.request_id, timeout, extra=_about(request))
        self._fail(state, DeadlineExceeded(f"the request had {timeout:.3f} s left when it came; they are over"))
        self._abandon(state)
        state.outbox.flush()

    def give_back(self, source: Source) -> None:
        """Ends a ticket whose KV nobody needs; if its owner does not answer, the lease does."""
        giving_back = self.peers.give_back(source.endpoint, source.incarnation, source.ticket)
        self._spawn(giving_back, "ticket-give-back")

    # --- a request's life ---

    async def _fetch(self, state: _Request, prefix_sources: Sequence[PrefixSource]) -> None:
        """Brings in what others have cached of a prompt that is prefilled here."""
        request = state.request
        self._num_transfers += 1
        try:
            state.num_fetched_tokens = await self.fetcher.fetch(
                request.request_id, shared_token_ids(request), request.cache_salt, prefix_sources, request.adapter
            )
            state.intake = None
            self._run(state, request)
        finally:
            self._num_transfers -= 1
            state.outbox.flush()

    async def _take_in(self, state: _Request, source: Source, prefix_sources: Sequence[PrefixSource]) -> None:
        """Brings the KV in and hands the request to the engine. Cancelling it frees all that it has."""
        intake = Intake(
            state.request,
            source,
            self._host,
            self.peers,
            self.reservations,
            self.metrics,
            self.description.max_model_len,
            self._spawn,
            self.fetcher,
            [each for each in prefix_sources if each.worker_id != source.worker_id],
            fail_without_kv=self._fail_without_kv,
        )
        self._num_transfers += 1
        try:
            num_cached_tokens = await intake.match()
            state.num_fetched_tokens = intake.num_loaded_tokens
            self._accept(state, num_cached_tokens)
            state.outbox.flush()
            request = await intake.receive()
            state.intake = None
            self._run(state, request)
        except PagewireError as error:
            self._fail(state, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled us: grpc.aio says so when a channel is closed under a call.
            self._fail(state, Unavailable(f"the channel to {source.endpoint} was closed"))
        except Exception:
            bug = Internal("bringing in the KV failed; the worker's log has the traceback")
            fields = _about(state.request) | {"error_id": bug.error_id}
            logger.exception("bringing in the KV of request %s failed", state.request.request_id, extra=fields)
            self._fail(state, bug)
        finally:
            self._num_transfers -= 1
            intake.release()
            state.outbox.flush()

    def _run(self, state: _Request, request: EngineRequest) -> None:
        """Hands a request to the engine, `adopted` blocks included."""
        state.open_choices = {choice for choice, _ in open_branches(request)}
        if not state.open_choices:
            self._end(state)
            return
        if state.accepted:
            num_adopted = 0 if request.adopted is None else request.adopted.num_tokens
            self._count_prefill(state.request, num_adopted)
        try:
            self._host.add(request)
        except RequestRefused as error:
            self._fail(state, refused(error))
        except EngineStopped:
            self._fail(state, Unavailable("this worker has stopped"))

    def _on_step(self, step: StepOutput, _: None) -> None:
        self.fetcher.observe_step(step)
        touched: list[Outbox] = []
        for request_id in step.admitted:
            self._queue.leave(request_id)
        for request_id, num_cached_tokens in step.cached:
            if (state := self._requests.get(request_id)) is not None and not state.accepted:
                state.num_fetched_tokens += step.num_loaded_tokens(request_id)
                self._accept(state, num_cached_tokens)
                self.fetcher.count_passed_over(state.num_passed_over_tokens, num_cached_tokens)
                self._count_prefill(state.request, num_cached_tokens)
                touched.append(state.outbox)
        for found in step.prompt_logprobs:
            if (state := self._requests.get(found.request_id)) is not None:
                state.outbox.add_prompt_logprobs(state.handle, found)
                touched.append(state.outbox)
        for token in step.tokens:
            if (state := self._requests.get(token.request_id)) is not None:
                state.outbox.add(state.handle, token)
                touched.append(state.outbox)
                if token.finish_reason is not None:
                    state.open_choices.discard(token.choice)
                    if not state.open_choices:
                        self._end(state)
        for failed in step.failed:
            if (state := self._requests.get(failed.request_id)) is not None:
                error = self._failure(failed)
                if isinstance(error, Internal):
                    fields = _about(state.request) | {"error_id": error.error_id}
                    logger.error("request %s: %s", failed.request_id, error.message, extra=fields)
                self._fail(state, error)
                touched.append(state.outbox)
        for outbox in dict.fromkeys(touched):
            outbox.flush()
        self.lender.relieve()

    def _failure(self, failed: RequestFailed) -> PagewireError:
        """Of an engine that has died it says nothing against the request: another worker goes on with it."""
        if self._host.engine.death.done():
            return Unavailable(f"this worker stops: {failed.message}")
        return _failure(failed)

    def _accept(self, state: _Request, num_cached_tokens: int) -> None:
        state.accepted = True
        state.outbox.accept(state.handle, num_cached_tokens)
        num_tokens = len(shared_token_ids(state.request))
        self.metrics.prompt_tokens.inc(num_tokens)
        self.metrics.prefix_cache_queries.inc(num_tokens)
        self.metrics.prefix_cache_hits.inc(num_cached_tokens)
        self.fetcher.metrics.begun(num_cached_tokens, state.num_fetched_tokens)

    def _end(self, state: _Request) -> None:
        self._forget(state)
        state.outbox.end(state.handle)

    def _fail(self, state: _Request, error: PagewireError) -> None:
        if self._requests.get(state.request.request_id) is state:
            self._forget(state)
            state.outbox.fail(state.handle, error)

    def _forget(self, state: _Request) -> None:
        if state.deadline is not None:
            state.deadline.cancel()
        del self._requests[state.request.request_id]
        self._queue.leave(state.request.request_id)
        self._host.announce()

    def _count_prefill(self, request: EngineRequest, num_present_tokens: int) -> None:
        num_shared = len(shared_token_ids(request))
        # The last token of an output is decoded, wherever the others were computed.
        num_own = num_shared - (num_shared > len(request.prompt_token_ids)) - num_present_tokens
        self.metrics.prefill_tokens_on_decode.inc(max(0, num_own))

    def _num_lacking_blocks(self) -> int:
        """More if transfers wait."""
        lacking = super()._num_lacking_blocks()
        return max(lacking, 1) if self.reservations.is_short else lacking


def _about(request: EngineRequest) -> dict[str, object]:
    return log_fields(request.request_id, request.trace_id)


def _failure(failed: RequestFailed) -> PagewireError:
    if failed.field:
        return InvalidArgument(f"request.{failed.field}", None, failed.message)
    return Internal(f"decoding failed: {failed.message}", error_id=failed.error_id)
