"""One request's spans of router, prefill and decode are one trace, at a real OTLP collector in this process."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.chaos.system import System
from tests.chaos.zygote import Zygote

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps (service name, span) of everything that comes."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[tuple[str, Any]]:
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]

    def is_complete(self, trace_id: str) -> bool:
        """The three outermost spans end last."""
        return {"request", "prefill", "decode"} <= {span.name for _, span in self.of_trace(trace_id)}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, f"http://127.0.0.1:{port}"
        server.stop(None).wait()


def test_one_trace_through_all_processes(
    zygote: Zygote,
    collector: tuple[Collector, str],
    tiny_model: Callable[..., Path],
    valkey_url: str,
    tmp_path: Path,
) -> None:
    spans, endpoint = collector
    traces = ("--otlp-traces-endpoint", endpoint)
    flags = ("--max-num-batched-tokens", "8", "--kv-cache-memory-bytes", str(1 << 20), *traces)
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=range(1, 31)),
        sampling=types_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    )
    model = tiny_model("llama")
    with System.forked(zygote, model, tmp_path, *flags, redis_url=valkey_url, router=traces) as cluster:
        with grpc.insecure_channel(cluster.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            metadata = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
            messages = list(stub.Generate(request, metadata=metadata, timeout=60))
            stray = list(stub.Generate(request, metadata=(("traceparent", "nonsense"),), timeout=60))
        assert messages[-1].done
        assert stray[-1].done
        deadline = time.monotonic() + 30
        while not spans.is_complete(TRACE):
            assert time.monotonic() < deadline, [(service, span.name) for service, span in spans.spans]
            time.sleep(0.05)
        found = spans.of_trace(TRACE)
        cluster.stop()
    tree = {(service, span.name): span for service, span in found}
    request_span = tree["pagewire-router", "request"]
    assert request_span.parent_span_id.hex() == CALLER
    parents = {
        ("pagewire-router", "queue"): request_span,
        ("pagewire-prefill", "prefill"): request_span,
        ("pagewire-prefill", "queue"): tree["pagewire-prefill", "prefill"],
        ("pagewire-prefill", "chunk"): tree["pagewire-prefill", "prefill"],
        ("pagewire-decode", "decode"): request_span,
        ("pagewire-decode", "transfer"): tree["pagewire-decode", "decode"],
        ("pagewire-decode", "generate"): tree["pagewire-decode", "decode"],
    }
    for service, span in found:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if (service, span.name) in parents:
            assert span.parent_span_id == parents[service, span.name].span_id, (service, span.name)
    assert set(tree) == {("pagewire-router", "request"), *parents}
    chunks = sorted(
        (span for _, span in found if span.name == "chunk"), key=lambda span: int(span.start_time_unix_nano)
    )
    computed = [
        attribute.value.int_value for span in chunks for attribute in span.attributes if attribute.key == "num_tokens"
    ]
    assert computed == [8, 8, 8, 6], "one for each step, however slowly its progress is read"
    queue = tree["pagewire-prefill", "queue"]
    assert queue.start_time_unix_nano >= tree["pagewire-prefill", "prefill"].start_time_unix_nano
    assert queue.end_time_unix_nano == chunks[0].start_time_unix_nano, "it waits until the first step begins"
    for earlier, later in pairwise(chunks):
        assert earlier.end_time_unix_nano <= later.start_time_unix_nano
    attributes = {each.key: each.value for each in request_span.attributes}
    assert attributes["num_completion_tokens"].int_value == 4
    strays = {span.trace_id for _, span in spans.spans} - {bytes.fromhex(TRACE)}
    assert len(strays) == 1, "a malformed traceparent begins a trace of its own"
