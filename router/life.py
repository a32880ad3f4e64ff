"""One request on the workers, from placement to its last token: hand-off, retry, migration, and the way out.

place ─► Prefill on P ──accepted(ticket)──► Session on D ──► tokens 1 …
              └────────first tokens 0───────────────────────► Generation (orders by index, drops duplicates)

P lost before its first tokens   another P, at last D alone          D lost   another D goes on after the outputs
finished, cancelled, out of time, refused: P cancelled, D cancelled, ticket released (`_stop`)
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import grpc

from pagewire.errors import KV_LOAD_FAILED, PagewireError, Unavailable
from pagewire.trace import log_fields, trace_id
from pagewire.worker_view import PrefixSource
from router.decode_session import DecodeSession
from router.failure import Failure
from router.generation import Generation
from router.placement import Demand, NoWorker, Placement, Worker
from router.prefill_client import prefill, release_ticket
from router.request import Logprobs, Token, TransferSource, WorkerCall
from router.services import Services

logger = logging.getLogger(__name__)

# Workers give up this much later than the router, so that it is the router who tells the client.
DEADLINE_MARGIN_SECONDS = 2.0


class Life:
    """`run` once. Times are the clock's, None until it happened; `deadline` is told to workers, not watched here."""

    def __init__(self, services: Services, call: WorkerCall, generation: Generation, deadline: float) -> None:
        self._services = services
        self._deadline = deadline
        self._call = call
        self._generation = generation
        self._wake = asyncio.Event()
        self._failure: Failure | None = None
        self._bug: Exception | None = None
        self._avoid_prefill: set[tuple[str, int]] = set()
        self._avoid_decode: set[tuple[str, int]] = set()
        self.num_failed_prefills = 0
        self.num_migrations = 0
        self.num_class_changes = 0
        self._num_attempts = 0
        # The prefill that runs; the worker stays known for its ticket.
        self._prefill_worker: Worker | None = None
        self._prefill_task: asyncio.Task[None] | None = None
        # Names the ticket of a prefill that may have been made but was not seen yet.
        self._unseen_ticket_of = ""
        self._is_continuation = False
        # A ticket that nobody has used up: set when P accepts, unset when D brings a token or it is released.
        self._source: TransferSource | None = None
        self._num_source_uses = 0
        # The decode that runs, or (before P's ticket is there) will.
        self._decode_worker: Worker | None = None
        self._prefix_sources: tuple[PrefixSource, ...] = ()
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

    async def run(self) -> None:
        """Returns when every choice is finished; raises PagewireError. Whatever happens, nothing keeps running."""
        try:
            try:
                self._start(self._services.place(self._demand()))
            except NoWorker as error:
                raise Unavailable(error.message) from None
            while not self._generation.is_finished:
                await self._wake.wait()
                self._wake.clear()
                if self._bug is not None:
                    raise self._bug
                failure, self._failure = self._failure, None
                if failure is not None and not self._generation.is_finished:
                    await self._recover(failure)
        finally:
            await self._stop()

    def worker_gone(self, is_alive: Callable[[Worker], bool]) -> None:
        """The fleet lost workers: a silent one is given up as if its stream had broken."""
        prefill_worker, decode_worker = self._prefill_worker, self._decode_worker
        if self._session is not None and decode_worker is not None and not is_alive(decode_worker):
            self.decode_failed(Unavailable(f"decode worker {decode_worker.worker_id} is gone"))
        if self._prefill_task is not None and prefill_worker is not None and not is_alive(prefill_worker):
            self.prefill_failed(Unavailable(f"prefill worker {prefill_worker.worker_id} is gone"))

    # --- starting ---

    def _demand(self) -> Demand:
        """A migrated request goes through prefill like a fresh one: there its prompt is cached, as a rule."""
        call, sampling = self._call, self._call.sampling
        open_outputs = self._open_outputs()
        # As on the workers: the output of a single choice is prefilled like a prompt, those of several are decode's.
        output = open_outputs[0] if len(open_outputs) == 1 else ()
        lost = self._decode_worker if self._generation.has_output else None
        return Demand(
            (*call.prompt_token_ids, *output),
            call.cache_salt,
            (sampling.max_tokens or 1) - len(output),
            len(open_outputs),
            self.num_failed_prefills < self._services.limits.max_prefills and self._has_prefix,
            "" if lost is None else lost.numerics_class,
            call.keys,
            call.session_id,
            call.request_id,
            call.adapter,
        )

    @property
    def _has_prefix(self) -> bool:
        """False if prefill could do nothing: several choices with output share the tokens before the prompt's last."""
        return len(self._call.prompt_token_ids) > 1 or not self._generation.has_output or len(self._open_outputs()) == 1

    def _open_outputs(self) -> list[tuple[int, ...]]:
        """What each choice that is not finished has brought so far."""
        so_far = self._generation.so_far()
        if not so_far:
            return [()] * self._call.sampling.n
        return [choice.output_token_ids for choice in so_far.values() if not choice.finished]

    def _start(self, placement: Placement) -> None:
        self.placement = placement
        self._decode_worker = placement.decode
        self._prefix_sources = placement.prefix_sources
        if placement.prefill is None:
            self._start_decode(None)
            return
        worker = self._prefill_worker = placement.prefill
        self._is_continuation = self._generation.has_output
        channel = self._services.placer.channel(worker)
        outputs, max_tokens = self._open_outputs(), self._call.sampling.max_tokens or 1
        # Prefill samples the next token of every choice, but not of several that have output.
        samples = not self._is_continuation or len(outputs) == 1
        hand_off = not samples or any(len(output) + 1 < max_tokens for output in outputs)
        attempt = self._attempt()
        self._unseen_ticket_of = attempt.request_id if hand_off else ""
        work = prefill(channel, attempt, self, hand_off=hand_off)
        self._prefill_task = asyncio.get_running_loop().create_task(work, name="prefill")

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
        choices = self._generation.so_far()
        self._num_attempts += 1
        request_id = f"{self._call.request_id}-{self._num_attempts}"
        return replace(
            self._call,
            request_id=request_id,
            choices=choices,
            seconds_left=left,
            prefix_sources=self._prefix_sources,
        )

    def log(self, level: int, message: str, **more: object) -> None:
        """One line about this request, with what finds it in the other processes' logs."""
        request_id = self._call.request_id
        fields = log_fields(request_id, trace_id(self._call.traceparent), **more)
        logger.log(level, "request %s: %s", request_id, message, extra=fields)

    # --- what workers say (plain calls) ---

    def prefill_accepted(self, ticket: bytes) -> None:
        self._accepted()
        self._unseen_ticket_of = ""
        worker = self._prefill_worker
        if ticket and worker is not None:
            self._source = TransferSource(worker.endpoint, worker.worker_id, worker.incarnation, ticket)
            self._num_source_uses = 1
            self._start_decode(self._source)

    def prefill_token(self, token: Token) -> None:
        self._token(token)

    def prefill_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        self._generation.accept_prompt_logprobs(start, entries)

    def prefill_done(self, num_cached_tokens: int) -> None:
        if self._prefill_task is not None:
            self._services.keep(self._prefill_task)
            self._prefill_task = None
        if self._prefill_worker is not None and not self._is_continuation:
            self.num_cached_tokens = num_cached_tokens
            self.prefilled_by = self._prefill_worker.worker_id
        if self._prefill_worker is not None:
            self._services.breakers.succeeded(self._prefill_worker.process)

    def prefill_failed(self, error: PagewireError) -> None:
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            self._unseen_ticket_of = ""  # it refused
        if self._prefill_worker is not None and self._prefill_task is not None:
            self._fail(Failure(error, self._prefill_worker, was_prefill=True))

    def decode_accepted(self, num_cached_tokens: int) -> None:
        self._accepted()
        if self._decode_prefills and self._decode_worker is not None:
            self.num_cached_tokens = num_cached_tokens
            self.prefilled_by = self._decode_worker.worker_id

    def decode_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        self._generation.accept_prompt_logprobs(start, entries)

    def decode_token(self, token: Token) -> None:
        self._source = None
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
        if error.reason == KV_LOAD_FAILED and self._prefill_worker is not None:
            # The decode worker is well; it is the prefill that has to be made again, elsewhere.
            self._fail(Failure(error, self._prefill_worker, was_prefill=True))
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
            self._bug = bug
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
        ticket_is_void = self._source is not None and is_not_found
        if not failure.is_retryable and (failure.was_prefill or not ticket_is_void):
            raise error
        self._stop_decode()
        if failure.was_prefill:
            self._avoid_prefill.add(failure.worker.process)
            self.num_failed_prefills += 1
            self._release_ticket()  # it may be done, whatever became of its stream, and then a lease owns the blocks
            await self._stop_prefill()
        else:
            self._avoid_decode.add(failure.worker.process)
            self.num_migrations += 1
            if self.num_migrations > limits.max_migrations:
                raise failure.given_up(limits.max_migrations)
            if ticket_is_void or not self._ticket_can_be_reused():
                await self._stop_prefill()
                self._release_ticket()
        self._generation.forget_early()
        placement = await self._place_again(error)
        if placement is None:
            return
        if self._generation.has_output and placement.decode.numerics_class != failed_class:
            self.num_class_changes += 1
            self.log(logging.WARNING, f"it goes on in numerics class {placement.decode.numerics_class}")
        if self._source is not None:
            # The ticket lives on: another decode worker attaches to it.
            self._num_source_uses += 1
            self._decode_worker = placement.decode
            self._prefix_sources = placement.prefix_sources
            self._start_decode(self._source)
        elif (
            failure.was_prefill
            and placement.prefill is None
            and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            and not self._generation.has_output
        ):
            raise error  # decode must not inherit what prefill has too much of
        else:
            self._start(placement)

    def _ticket_can_be_reused(self) -> bool:
        """Once, since it may be the ticket's fault that decode failed."""
        worker = self._prefill_worker
        alive = worker is not None and self._services.placer.is_alive(worker)
        return self._source is not None and self._num_source_uses < 2 and alive

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

    async def _stop(self) -> None:
        """Frees everything on both sides. Idempotent."""
        self._stop_decode()
        self._release_ticket()
        await self._stop_prefill()

    def _stop_decode(self) -> None:
        if self._session is not None:
            self._session.cancel(self._handle)
            self._session = None

    async def _stop_prefill(self) -> None:
        task, self._prefill_task = self._prefill_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # The worker may have been done, and its lease begun, before it heard of the cancellation.
        request_id, self._unseen_ticket_of = self._unseen_ticket_of, ""
        if request_id and self._prefill_worker is not None:
            channel = self._services.placer.channel(self._prefill_worker)
            self._services.spawn(release_ticket(channel, b"", request_id))

    def _release_ticket(self) -> None:
        source, self._source = self._source, None
        if source is not None and self._prefill_worker is not None:
            channel = self._services.placer.channel(self._prefill_worker)
            self._services.spawn(release_ticket(channel, source.ticket))
