"""OpenTelemetry spans, sent by OTLP over gRPC. Needs `pagewire[otel]`; without an endpoint nothing of it is imported.

request (router)            the whole request, in the caller's trace if it sent `traceparent`
├── queue                   until a worker accepted it
├── prefill (prefill)       ├── queue   ├── chunk, one per engine step that computed a part of the prompt
└── decode (decode)         ├── transfer                   └── generate
"""

import os
import time
from typing import Any

from pagewire.config import ConfigError

Attributes = dict[str, str | int | float | bool]


class Span:
    """One piece of work; `end` it once. Times are nanoseconds since the epoch, None is now."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        """What those who work for it are told (W3C Trace Context)."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def child(self, name: str, *, started_at: int | None = None, **attributes: str | int | float | bool) -> "Span":
        """A part of it."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        return Span(self._tracer, self._tracer.start_span(name, context, attributes=attributes, start_time=started_at))

    def end(
        self, error: BaseException | None = None, *, at: int | None = None, **attributes: str | int | float | bool
    ) -> None:
        """With an error, the span is marked as failed."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))
        self._span.end(at)


class Tracer:
    """Makes spans and sends them in the background, bounded: what a collector does not take in time is dropped."""

    def __init__(self, endpoint: str, process: str, instance: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(f"otlp_traces_endpoint: {error}: install 'pagewire[otel]'") from None
        resource = Resource.create({"service.name": f"pagewire-{process}", "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("pagewire")

    def start(self, name: str, traceparent: str, **attributes: str | int | float | bool) -> Span:
        """A span of the caller's trace; without one, or with one that is malformed, of a new trace."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        return Span(self._tracer, self._tracer.start_span(name, context, attributes=attributes))

    def close(self) -> None:
        """Sends what is left; may take seconds if the collector is gone."""
        self._provider.shutdown()


def make_tracer(endpoint: str | None, process: str, instance: str = "") -> Tracer | None:
    """None without an endpoint."""
    return None if endpoint is None else Tracer(endpoint, process, instance or f"{os.uname().nodename}-{os.getpid()}")


def now() -> int:
    """For `started_at` and `at`."""
    return time.time_ns()
