"""The router's spans: a pipeline that puts each request into its caller's trace and tells workers its own span."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pagewire.tracing import Tracer, now
from router.backend import Output, Started
from router.pipeline import Pipeline
from router.request import GenerateCall, Summary


class TracedPipeline(Pipeline):
    """A Pipeline; only routers with tracing have one."""

    def __init__(self, *arguments: Any, tracer: Tracer, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tracer = tracer

    async def generate(self, call: GenerateCall, *, seconds_left: float | None = None) -> AsyncGenerator[Output]:
        started_at = now()
        span = self._tracer.start("request", call.traceparent, model=self.model.name)
        error: BaseException | None = None
        attributes: dict[str, Any] = {}
        call = replace(call, traceparent=span.traceparent)
        try:
            async with aclosing(super().generate(call, seconds_left=seconds_left)) as outputs:
                async for output in outputs:
                    if isinstance(output, Started):
                        attributes["request_id"] = output.request_id
                    elif isinstance(output, Summary):
                        queue = span.child("queue", started_at=started_at)
                        queue.end(at=started_at + round(output.queue_ms * 1e6))
                        attributes |= {
                            "num_prompt_tokens": output.prompt_tokens,
                            "num_completion_tokens": output.completion_tokens,
                            "num_cached_tokens": output.cached_tokens,
                            "ttft_ms": output.ttft_ms,
                            "prefill_worker": output.prefill_worker,
                            "decode_worker": output.decode_worker,
                        }
                    yield output
        except BaseException as raised:
            error = raised
            raise
        finally:
            span.end(error, **attributes)
