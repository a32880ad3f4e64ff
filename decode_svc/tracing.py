"""The decode worker's spans: transfer (the KV comes in), then generate."""

from typing import Any

from decode_svc.service import DecodeServicer
from decode_svc.worker import DecodeWorker
from engine.request import EngineRequest
from pagewire.errors import PagewireError
from pagewire.tracing import Span, Tracer
from pagewire.v1 import decode_pb2


class TracedDecodeWorker(DecodeWorker):
    """A DecodeWorker that knows the spans of its requests; only workers with tracing have one."""

    def __init__(self, *arguments: Any, tracer: Tracer, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tracer = tracer
        # (decode, the part that runs) by request id.
        self._spans: dict[str, tuple[Span, Span]] = {}

    def begin(self, message: decode_pb2.DecodeRequest) -> None:
        """Before `submit`."""
        request = message.request
        span = self._tracer.start("decode", request.traceparent, request_id=request.request_id)
        part = "transfer" if message.HasField("source") else "generate"
        self._spans[request.request_id] = (span, span.child(part))

    def submit(self, request: EngineRequest, *arguments: Any, **options: Any) -> None:
        try:
            super().submit(request, *arguments, **options)
        except PagewireError as error:
            self._finish(request.request_id, error)
            raise

    def _run(self, state: Any, request: EngineRequest) -> None:
        if state.accepted and (spans := self._spans.get(request.request_id)) is not None:
            span, transfer = spans
            transfer.end(num_adopted_tokens=0 if request.adopted is None else request.adopted.num_tokens)
            self._spans[request.request_id] = (span, span.child("generate"))
        super()._run(state, request)

    def _fail(self, state: Any, error: PagewireError) -> None:
        request_id = state.request.request_id
        if self._requests.get(request_id) is state:
            self._finish(request_id, error)
        super()._fail(state, error)

    def _forget(self, state: Any) -> None:
        """Every way out comes by here."""
        super()._forget(state)
        self._finish(state.request.request_id)

    def _finish(self, request_id: str, error: PagewireError | None = None) -> None:
        if (spans := self._spans.pop(request_id, None)) is not None:
            for each in reversed(spans):
                each.end(error)


class TracedDecodeServicer(DecodeServicer):
    """A DecodeServicer that opens the spans."""

    def __init__(self, worker: TracedDecodeWorker) -> None:
        super().__init__(worker)
        self._traced_worker = worker

    def _translate(self, message: decode_pb2.DecodeRequest) -> Any:
        translated = super()._translate(message)
        self._traced_worker.begin(message)
        return translated
