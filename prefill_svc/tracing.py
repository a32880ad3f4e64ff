"""The prefill worker's spans: queue until the engine's first step with it begins, then one chunk per step."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from engine.request import PrefillProgress, StepOutput
from pagewire.tracing import Span, Tracer
from pagewire.v1 import prefill_pb2
from prefill_svc.manifests import ComputedBlocks
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillWorker


class _Parts:
    """What a request's prefill consists of: it waits, then steps compute a chunk each."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._queue: Span | None = span.child("queue")

    def begin(self, num_cached_tokens: int, at: int) -> None:
        """The first step with it has begun."""
        if self._queue is not None:
            self._queue.end(at=at, num_cached_tokens=num_cached_tokens)
            self._queue = None

    def add_chunk(self, progress: PrefillProgress, started_at: int, ended_at: int) -> None:
        """A step has computed a part of it. After a preemption its tokens are computed again."""
        chunk = self._span.child("chunk", started_at=started_at)
        chunk.end(at=ended_at, num_tokens=progress.num_new_tokens, num_computed_tokens=progress.num_computed_tokens)

    def end(self, error: BaseException | None) -> None:
        if self._queue is not None:
            self._queue.end(error)
        self._span.end(error)


class TracedPrefillWorker(PrefillWorker):
    """A PrefillWorker that knows the spans of its requests; only workers with tracing have one."""

    def __init__(self, *arguments: Any, tracer: Tracer, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tracer = tracer
        self.parts: dict[str, _Parts] = {}

    def _on_step(self, step: StepOutput, collected: list[ComputedBlocks]) -> None:
        if self.parts and step.ended_at:
            self._trace(step)
        super()._on_step(step, collected)

    def _trace(self, step: StepOutput) -> None:
        ended_at = round(step.ended_at * 1e9)
        started_at = ended_at - round(step.seconds * 1e9)
        for request_id, num_cached_tokens in step.cached:
            if (parts := self.parts.get(request_id)) is not None:
                parts.begin(num_cached_tokens, started_at)
        for progress in step.progress:
            if (parts := self.parts.get(progress.request_id)) is not None:
                parts.add_chunk(progress, started_at, ended_at)


class TracedPrefillServicer(PrefillServicer):
    """A PrefillServicer that opens and ends the spans."""

    def __init__(self, worker: TracedPrefillWorker) -> None:
        super().__init__(worker)
        self._traced_worker = worker

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        body, worker = request.request, self._traced_worker
        parts = _Parts(
            worker.tracer.start(
                "prefill", body.traceparent, request_id=body.request_id, num_prompt_tokens=len(body.prompt_token_ids)
            )
        )
        error: BaseException | None = None
        # A second request with the id of one that runs is refused, and must not take its place.
        is_first = worker.parts.setdefault(body.request_id, parts) is parts
        stream: Any = super().Prefill(request, context)
        try:
            async with aclosing(stream) as responses:
                async for response in responses:
                    yield response
        except BaseException as raised:
            error = raised
            raise
        finally:
            if is_first:
                del worker.parts[body.request_id]
            parts.end(error)
