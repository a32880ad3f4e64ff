"""One request on the workers, from placement to its last token: hand-off, retry, migration, and the way out.

place ─► Prefill on P ──accepted(ticket)──► Session on D ──► tokens 1 …
              └────────first tokens 0───────────────────────► Generation (orders by index, drops duplicates)

P lost before its first tokens   another P, at last D alone          D lost   another D goes on after the outputs
finished, cancelled, out of time, refused: P cancelled, D cancelled, ticket released (`stop`)
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import grpc

from pagewire.errors import KV_LOAD_FAILED, PagewireError, Unavailable
from pagewire.trace import log_fields, trace_id
from router.continuation import demand, needs_decode
from router.decode_session import DecodeSession
from router.failure import Failure
from router.generation import Generation
from router.placement import Demand, NoWorker, Placement, Worker
from router.prefill_run import PrefillRun
from router.request import Logprobs, Token, TransferSource, WorkerCall
from router.services import Services

logger = logging.getLogger(__name__)

# Workers give up this much later than the router, so that it is the router who tells the client.
DEADLINE_MARGIN_SECONDS = 2.0


class Life:
    """`start`, then `run`, once. Times are the clock's, None until it happened.

    `deadline` is told to workers, not watched here.
    """

    def __init__(self, services: Services, call: WorkerCall, generation: Generation, deadline: float) -> None:
        self._services = services
        self._deadline = deadline
        self._call = call
        self._generation = generation
        self._wake = asyncio.Event()
        self._failure: Failure | None = None
        self._error: Exception | None = None
        self._avoid_prefill: set[tuple[str, int]] = set()
        self._avoid_decode: set[tuple[str, int]] = set()
        self.num_failed_prefills = 0
        self.num_migrations = 0
        self.num_class_changes = 0
        self._num_attempts = 0
        self._prefill: PrefillRun | None = None  # the newest
        # The decode that runs, or (before P's ticket is there) will.
        self._decode_worker: Worker | None = None
        self._hints: Placement | None = None  # the newest: what workers are told of it
        self._session: DecodeSession | None = None
        self._handle = 0
        self._decode_prefills = False
        # What the summary wants to know.
        self.accepted_at: float | None = None
        self.first_token_at: float | None = None
        self.num_cached_tokens = 0
        self.prefilled_by = ""
        self.decoded_by = ""
        self.placement: Placement | None = None  # the newest
        generation.on_finished(self._wake.set)

    def start(self) -> None:
        """Sends it to its workers: `run`, in a task of its own, would wait for a turn. What fails, `run` raises."""
        try:
            self._start(self._services.place(self._demand()))
        except NoWorker as error:
            self._end(Unavailable(error.message))
        except Exception as error:
            self._end(error)

    async def run(self) -> None:
        """Returns when every choice is finished; raises PagewireError. Whatever happens, nothing keeps running."""
        try:
            while not self._generation.is_finished:
                await self._wake.wait()
                self._wake.clear()
                if self._error is not None:
                    raise self._error
                failure, self._failure = self._failure, None
                if failure is not None and not self._generation.is_finished:
                    await self._recover(failure)
        finally:
            await self.stop()

    def worker_gone(self, is_alive: Callable[[Worker], bool]) -> None:
        """The fleet lost workers: a silent one is given up as if its stream had broken."""
        run, decode_worker = self._prefill, self._decode_worker
        if self._session is not None and decode_worker is not None and not is_alive(decode_worker):
            self.decode_failed(Unavailable(f"decode worker {decode_worker.worker_id} is gone"))
        if run is not None and run.is_running and not is_alive(run.worker):
            self.prefill_failed(Unavailable(f"prefill worker {run.worker.worker_id} is gone"))

    # --- starting ---

    def _demand(self) -> Demand:
        lost = self._decode_worker if self._generation.has_output else None
        may_prefill = self.num_failed_prefills < self._services.limits.max_prefills
        return demand(self._call, self._generation.so_far(), lost, may_prefill=may_prefill)

    def _start(self, placement: Placement) -> None:
        self.placement = self._hints = placement
        self._decode_worker = placement.decode
        if placement.prefill is None:
            self._start_decode(None)
            return
        attempt = self._attempt()
        self._prefill = PrefillRun(self._services, placement.prefill, attempt, hand_off=needs_decode(attempt))
        self._prefill.start(self)

    def _start_decode(self, source: TransferSource | None) -> None:
        worker = self._decode_worker
        if worker is None:
            raise RuntimeError("decode was started before it was placed")
        self._decode_prefills = source is None and not self._generation.has_output
        self._session = self._services.sessions.get(worker.endpoint, self._services.placer.channel(worker))
        # With a ticket, the decode worker learns the first tokens from the prefill worker.
        self._handle = self._session.start(self._attempt(), source, self)

    def _attempt(self) -> WorkerCall:
        """The call under an id of its own, since two attempts may meet at one worker; with all that is fact."""
        left = max(0.0, self._deadline - self._services.clock()) + DEADLINE_MARGIN_SECONDS
        choices, hints = self._generation.so_far(), self._hints
        self._num_attempts += 1
        request_id = f"{self._call.request_id}-{self._num_attempts}"
        return replace(
            self._call,
            request_id=request_id,
            choices=choices,
            seconds_left=left,
            prefix_sources=() if hints is None else hints.prefix_sources,
            num_expected_tokens=0 if hints is None else hints.num_expected_tokens,
        )

    def log(self, level: int, message: str, **more: object) -> None:
        """One line about this request, with what finds it in the other processes' logs."""
        request_id = self._call.request_id
        fields = log_fields(request_id, trace_id(self._call.traceparent), **more)
        logger.log(level, "request %s: %s", request_id, message, extra=fields)

    # --- what workers say (plain calls) ---

    def prefill_accepted(self, ticket: bytes) -> None:
        self._accepted()
        if self._prefill is not None:
            self._prefill.accepted(ticket)
            if self._prefill.ticket is not None:
                self._start_decode(self._prefill.use_ticket())

    def prefill_token(self, token: Token) -> None:
        self._token(token)

    def prefill_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        self._generation.accept_prompt_logprobs(start, entries)

    def prefill_done(self, num_cached_tokens: int) -> None:
        run = self._prefill
        if run is None:
            return
        run.done()
        if not run.is_continuation:
            self.num_cached_tokens = num_cached_tokens
            self.prefilled_by = run.worker.worker_id
        self._services.breakers.succeeded(run.worker.process)

    def prefill_failed(self, error: PagewireError) -> None:
        run = self._prefill
        if run is None:
            return
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            run.refused()
        if run.is_running:
            self._fail(Failure(error, run.worker, was_prefill=True))

    def decode_accepted(self, num_cached_tokens: int) -> None:
        self._accepted()
        if self._decode_prefills and self._decode_worker is not None:
            self.num_cached_tokens = num_cached_tokens
            self.prefilled_by = self._decode_worker.worker_id

    def decode_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        self._generation.accept_prompt_logprobs(start, entries)

    def decode_token(self, token: Token) -> None:
        if self._prefill is not None:
            self._prefill.ticket = None  # used up
        if self._generation.contradicts(token):
            # It lost the prefill worker and sampled the first token anew, in another numerics class: start it over
            # from what is a fact.
            self._stop_decode()
            message = f"token {token.index} of choice {token.choice} is not the one that was sent"
            self.decode_failed(PagewireError(message, code=grpc.StatusCode.ABORTED))
            return
        if self._decode_worker is not None:
            self.decoded_by = self._decode_worker.worker_id
            self._services.breakers.succeeded(self._decode_worker.process)
        self._token(token)

    def decode_failed(self, error: PagewireError) -> None:
        if error.reason == KV_LOAD_FAILED and self._prefill is not None:
            # The decode worker is well; it is the prefill that has to be made again, elsewhere.
            self._fail(Failure(error, self._prefill.worker, was_prefill=True))
        elif self._decode_worker is not None:
            self._fail(Failure(error, self._decode_worker, was_prefill=False))

    def _accepted(self) -> None:
        if self.accepted_at is None:
            self.accepted_at = self._services.clock()

    def _token(self, token: Token) -> None:
        if self.first_token_at is None:
            self.first_token_at = self._services.clock()
        try:
            self._generation.accept(token)
        except Exception as bug:
            # It must end this request, not the session that it shares with others.
            self._end(bug)

    def _end(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    def _fail(self, failure: Failure) -> None:
        # Of two failures at once the prefill's counts: recovering from it restarts decode too.
        if self._failure is None or failure.was_prefill:
            self._failure = failure
        self._wake.set()

    # --- failures ---

    async def _recover(self, failure: Failure) -> None:
        """Starts the request anew, or raises the failure's error if it is about the request."""
        error, limits = failure.error, self._services.limits
        failed_class = failure.worker.numerics_class
        self.log(logging.WARNING, str(failure), worker_id=failure.worker.worker_id, code=error.code.name)
        if failure.is_the_workers_fault:
            self._services.breakers.failed(failure.worker.process, self._services.clock(), error.message)
        is_not_found = error.code is grpc.StatusCode.NOT_FOUND and not failure.lacks_adapter
        run = self._prefill
        ticket_is_void = run is not None and run.ticket is not None and is_not_found
        if not failure.is_retryable and (failure.was_prefill or not ticket_is_void):
            raise error
        self._stop_decode()
        if failure.was_prefill:
            self._avoid_prefill.add(failure.worker.process)
            self.num_failed_prefills += 1
            if run is not None:
                run.release_ticket()  # it may be done, whatever became of its stream, and then a lease owns the blocks
                await run.stop()
        else:
            self._avoid_decode.add(failure.worker.process)
            self.num_migrations += 1
            if self.num_migrations > limits.max_migrations:
                raise failure.given_up(limits.max_migrations)
            if run is not None and (ticket_is_void or not run.can_reuse_ticket):
                await run.stop()
                run.release_ticket()
        self._generation.forget_early()
        placement = await self._place_again(error)
        if placement is None:
            return
        if self._generation.has_output and placement.decode.numerics_class != failed_class:
            self.num_class_changes += 1
            self.log(logging.WARNING, f"it goes on in numerics class {placement.decode.numerics_class}")
        if run is not None and run.ticket is not None:
            # The ticket lives on: another decode worker attaches to it.
            self._decode_worker = placement.decode
            self._hints = placement
            self._start_decode(run.use_ticket())
        elif (
            failure.was_prefill
            and placement.prefill is None
            and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            and not self._generation.has_output
        ):
            raise error  # decode must not inherit what prefill has too much of
        else:
            self._start(placement)

    async def _place_again(self, error: PagewireError) -> Placement | None:
        """Waits a little for a worker if there is none; None if prefill finished the request meanwhile."""
        limits, clock = self._services.limits, self._services.clock
        failed_at = clock()
        is_full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        while not self._generation.is_finished:
            waited = clock() - failed_at
            forgiving = waited >= limits.avoid_seconds
            avoid = self._avoid_prefill if forgiving else self._avoid_prefill | self._avoid_decode
            try:
                return self._services.place(self._demand(), avoid)
            except NoWorker as none:
                if is_full and not self._generation.has_output:
                    raise error from None
                has_begun = self.accepted_at is not None or none.avoided
                if not has_begun or waited >= limits.wait_seconds:
                    raise Unavailable(f"{none.message}; the last one failed: {error.message}") from None
            await asyncio.sleep(limits.poll_seconds)
        return None

    # --- the way out ---

    async def stop(self) -> None:
        """Frees everything on both sides. Idempotent."""
        self._stop_decode()
        if self._prefill is not None:
            self._prefill.release_ticket()
            await self._prefill.stop()

    def _stop_decode(self) -> None:
        if self._session is not None:
            self._session.cancel(self._handle)
            self._session = None
