"""The prefill worker: an engine that computes prompts, tickets on what it computed, and the pulls that read it."""

import logging
from collections.abc import Sequence

from engine.admission import open_branches
from engine.engine import Engine
from engine.errors import EngineStopped, RequestRefused
from engine.host import EngineHost, SequencedPublisher
from engine.request import EngineRequest, HeldKv, RequestFailed, StepOutput, TokenOutput
from pagewire.admission_queue import duplicate_request
from pagewire.errors import Internal, InvalidArgument, PagewireError, Unavailable
from pagewire.trace import log_fields
from pagewire.worker_view import PrefixSource
from prefill_svc.manifests import BlockCollector, ComputedBlocks, ManifestWriter
from prefill_svc.stream import Done, PrefillStream, Progress
from transfer_svc.ticket import PrefillResult
from transfer_svc.worker import KvWorker, WorkerSetup, refused

logger = logging.getLogger(__name__)


class PrefillWorker(KvWorker):
    """Everything happens on one event loop."""

    def __init__(self, engine: Engine, setup: WorkerSetup) -> None:
        self._collector = BlockCollector(engine.kv_cache)
        host = EngineHost(engine, setup.metrics, prepare=self._collector.prepare, on_step=self._on_step)
        super().__init__(engine, setup, host)
        self._manifests = ManifestWriter(host, self.leases, setup.clock, self.sender.wake)
        self._streams: dict[str, PrefillStream] = {}
        self._first_tokens: dict[str, list[TokenOutput]] = {}

    async def start(self, publisher: SequencedPublisher | None = None) -> None:
        await super().start(publisher)
        self._manifests.start()

    def _give_up(self) -> None:
        for stream in list(self._streams.values()):
            stream.put(Unavailable("this worker has stopped"))
            self.cancel(stream, "the worker stopped")

    async def _engine_stopped(self) -> None:
        await self._manifests.stop()

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    # --- requests ---

    def prefill(
        self,
        request: EngineRequest,
        *,
        hand_off: bool,
        sources: Sequence[PrefixSource] = (),
        router_id: str = "",
        num_expected_tokens: int = 0,
    ) -> PrefillStream:
        """Admits a request or refuses it at once. The caller calls `cancel` when its stream ends, however it ends.

        `sources` are said to hold leading blocks of it; what is fetched from them need not be computed. `router_id`:
        whose request it is. `num_expected_tokens`: as many leading ones the router thinks are there or can be fetched.
        """
        try:
            if request.request_id in self._streams:
                raise duplicate_request(request.request_id)
            num_tokens = len(request.prompt_token_ids)
            self._queue.enter(request.request_id, num_tokens, request.tenant, num_expected_tokens=num_expected_tokens)
        except PagewireError as error:
            self.metrics.rejected(error.rejection)
            raise
        ticket = b""
        if hand_off:
            groups, num_tokens = self._host.kv_cache.groups, num_prefill_tokens(request)
            firsts = groups.first_blocks(groups.restart(num_tokens)) if groups.slides else ()
            ticket = self.leases.open(request.request_id, num_tokens, request.trace_id, router_id, firsts).name
        stream = PrefillStream(request.request_id, ticket, request.trace_id)
        self._streams[request.request_id] = stream
        self._first_tokens[request.request_id] = []
        if hand_off:
            self._collector.watch(request.request_id)
        self._enter(stream, request, sources)
        self._host.announce()
        return stream

    def _enter(self, stream: PrefillStream, request: EngineRequest, sources: Sequence[PrefixSource]) -> None:
        """Hands the request to the engine, at once or after a fetch. Raises PagewireError."""
        try:
            if request.may_use_cache and self.fetcher.wants(sources):
                self._host.engine.check(request)
                stream.fetching = self._spawn(self._fetch(stream, request, sources), f"fetch-{request.request_id}")
            else:
                if request.may_use_cache:
                    num_tokens = num_prefill_tokens(request)
                    stream.num_passed_over_tokens = self.fetcher.num_passed_over(sources, num_tokens)
                self._host.add(request)
        except RequestRefused as error:
            self._forget(request.request_id, stream)
            self.cancel(stream, "it was refused")
            refusal = refused(error)
            self.metrics.rejected(refusal.rejection)
            raise refusal from None
        except EngineStopped:
            self.cancel(stream, "the worker stopped")
            raise Unavailable("this worker has stopped") from None

    async def _fetch(self, stream: PrefillStream, request: EngineRequest, sources: Sequence[PrefixSource]) -> None:
        """The request waits for its own blocks; others go on meanwhile."""
        branches = open_branches(request)
        token_ids = request.prompt_token_ids + (branches[0][1] if len(branches) == 1 else ())
        stream.num_fetched_tokens = await self.fetcher.fetch(
            request.request_id, token_ids, request.cache_salt, sources, request.adapter
        )
        stream.fetching = None
        try:
            self._enter(stream, request, ())
        except PagewireError as error:
            stream.put(error)
        self._host.announce()

    def cancel(self, stream: PrefillStream, reason: str = "its prefill was cancelled") -> None:
        """The stream ended. If prefill had not, it is aborted within one chunk, and the ticket goes with it."""
        if self._forget(stream.request_id, stream):
            if stream.fetching is not None:
                stream.fetching.cancel()
            self.metrics.requests_cancelled.inc()
            self._host.abort(stream.request_id)
        if not stream.ended and stream.ticket:
            self.sender.drop(stream.ticket, reason)

    def release_ticket(self, name: bytes) -> bool:
        """The router gives up a ticket, whatever its state; False if it is gone."""
        return self.sender.drop(name, "the router released it")

    def release_request(self, request_id: str) -> bool:
        """The same for a router that never saw the ticket: it gave up while the answer was on its way."""
        name = self.leases.find(request_id)
        return name is not None and self.release_ticket(name)

    def _forget(self, request_id: str, stream: PrefillStream) -> bool:
        """Ends the bookkeeping of a request; False if that was done before."""
        if self._streams.get(request_id) is not stream:
            return False
        del self._streams[request_id], self._first_tokens[request_id]
        self._queue.leave(request_id)
        self._collector.forget(request_id)
        self._host.announce()
        return True

    # --- what steps bring ---

    def _on_step(self, step: StepOutput, collected: list[ComputedBlocks]) -> None:
        self.fetcher.observe_step(step)
        for request_id in step.admitted:
            self._queue.leave(request_id)
        for request_id, num_cached_tokens in step.cached:
            self._start(request_id, num_cached_tokens, step.num_loaded_tokens(request_id))
        for blocks in collected:
            stream = self._streams.get(blocks.request_id)
            if stream is None:
                self._host.kv_cache.release(blocks.block_ids)
            else:
                self._manifests.add(stream.ticket, blocks)
        for progress in step.progress:
            if (stream := self._streams.get(progress.request_id)) is not None:
                stream.put(Progress(progress.num_computed_tokens, progress.num_cached_tokens))
        for found in step.prompt_logprobs:
            if (stream := self._streams.get(found.request_id)) is not None:
                stream.put(found)
        for token in step.tokens:
            if token.request_id in self._first_tokens:
                self._first_tokens[token.request_id].append(token)
        for held in step.held:
            self._finish(held)
        for failed in step.failed:
            self._fail(failed)
        self.lender.relieve()

    def _start(self, request_id: str, num_cached_tokens: int, num_loaded_tokens: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self.fetcher.metrics.begun(num_cached_tokens, stream.num_fetched_tokens + num_loaded_tokens)
            self.fetcher.count_passed_over(stream.num_passed_over_tokens, num_cached_tokens)
            if stream.ticket:
                self.leases.start(stream.ticket, num_cached_tokens)

    def _finish(self, held: HeldKv) -> None:
        stream = self._streams.get(held.request_id)
        if stream is None:
            return
        tokens = tuple(self._first_tokens[held.request_id])
        self._forget(held.request_id, stream)
        stream.put(Done(tokens, held.num_cached_tokens))
        if stream.ticket:
            result = PrefillResult(held.num_tokens, held.num_cached_tokens, tokens, self._clock())
            self._manifests.complete(stream.ticket, result)
        self.metrics.prompt_tokens.inc(held.num_tokens)
        self.metrics.prefix_cache_queries.inc(held.num_tokens)
        self.metrics.prefix_cache_hits.inc(held.num_cached_tokens)

    def _fail(self, failed: RequestFailed) -> None:
        stream = self._streams.get(failed.request_id)
        if stream is None:
            return
        self._forget(failed.request_id, stream)
        if stream.ticket:
            self.sender.drop(stream.ticket, f"its prefill failed: {failed.message}")
        if failed.field:
            stream.put(InvalidArgument(f"request.{failed.field}", None, failed.message))
            return
        if self._host.engine.death.done():  # nothing against the request: another worker takes it
            stream.put(Unavailable(f"this worker stops: {failed.message}"))
            return
        bug = Internal(f"prefill failed: {failed.message}", error_id=failed.error_id)
        fields = log_fields(failed.request_id, stream.trace_id, error_id=bug.error_id)
        logger.error("request %s: %s", failed.request_id, bug.message, extra=fields)
        stream.put(bug)

    def _is_under_pressure(self) -> bool:
        return len(self._queue) > 0


def num_prefill_tokens(request: EngineRequest) -> int:
    """Tokens whose KV a prefill makes: the prompt and, when only one choice is open, that choice's output so far."""
    branches = open_branches(request)
    return len(request.prompt_token_ids) + (len(branches[0][1]) if len(branches) == 1 else 0)
