"""The prefill worker's spans: queue, then one per chunk."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from pagewire.tracing import Tracer, now
from pagewire.v1 import prefill_pb2
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillWorker


class TracedPrefillServicer(PrefillServicer):
    """A PrefillServicer; only workers with tracing have one."""

    def __init__(self, worker: PrefillWorker, tracer: Tracer) -> None:
        super().__init__(worker)
        self._tracer = tracer

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        body = request.request
        span = self._tracer.start(
            "prefill", body.traceparent, request_id=body.request_id, num_prompt_tokens=len(body.prompt_token_ids)
        )
        error: BaseException | None = None
        last_at, num_computed = now(), -1
        stream: Any = super().Prefill(request, context)
        try:
            async with aclosing(stream) as responses:
                async for response in responses:
                    if response.HasField("accepted"):
                        queue = span.child("queue", started_at=last_at)
                    elif response.HasField("progress"):
                        progress, at = response.progress, now()
                        if num_computed < 0:
                            # Its first step has ended; what was cached tells where it began.
                            num_computed = progress.num_cached_tokens
                            queue.end(at=at, num_cached_tokens=progress.num_cached_tokens)
                            last_at = at
                        chunk = span.child("chunk", started_at=last_at)
                        num_tokens = progress.num_computed_tokens - num_computed
                        chunk.end(at=at, num_tokens=num_tokens, num_computed_tokens=progress.num_computed_tokens)
                        last_at, num_computed = at, progress.num_computed_tokens
                    yield response
        except BaseException as raised:
            error = raised
            raise
        finally:
            span.end(error)
