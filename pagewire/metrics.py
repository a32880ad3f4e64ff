"""Prometheus metrics that every process has, what its own are made of, and the server that shows them.

vLLM's names where vLLM has one, `pagewire:` otherwise. A process makes one CollectorRegistry, one RpcMetrics and one
RouterMetrics (`router_metrics.py`) or WorkerMetrics (`worker_metrics.py`) on it.
"""

import threading
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from pagewire.ports import BindError

# Seconds. From a cached prompt on a small model to a long prompt on a CPU.
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LABELS = ("model_name",)


@dataclass(frozen=True, slots=True)
class OfModel:
    """Makes metrics that are labelled with the model's name."""

    registry: CollectorRegistry
    model_name: str

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(self.model_name)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self.registry).labels(self.model_name)

    def histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, LABELS, buckets=LATENCY_BUCKETS, registry=self.registry).labels(self.model_name)


class RpcMetrics:
    """What the interceptor reports; `observe` goes into `rpc.build_server`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "pagewire:rpc_requests",
            "RPCs that ended, by method and status code.",
            ("method", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "pagewire:rpc_seconds",
            "Duration of RPCs, streams included.",
            ("method",),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._of: dict[tuple[str, str], tuple[Counter, Histogram]] = {}  # labels() takes locks and makes strings

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one RPC; `method` is the full name ("/pagewire.v1.InferenceService/Generate")."""
        known = self._of.get((method, code))
        if known is None:
            known = self._of[method, code] = self._requests.labels(method, code), self._seconds.labels(method)
        requests, durations = known
        requests.inc()
        durations.observe(seconds)


def rejected_counter(registry: CollectorRegistry) -> Counter:
    """By model and reason."""
    text = "Requests that were refused at once: what was full (max_queued_requests …), else the status code."
    return Counter("pagewire:requests_rejected", text, (*LABELS, "reason"), registry=registry)


class MetricsServer:
    """Serves a registry at http://host:port/metrics from a thread of its own until `close`."""

    def __init__(self, registry: CollectorRegistry, port: int, host: str = "127.0.0.1") -> None:
        try:
            started: tuple[Any, threading.Thread] = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise BindError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from None
        self._server: WSGIServer = started[0]
        self._thread = started[1]

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops serving; returns when the thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
