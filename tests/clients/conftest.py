"""One real system for all clients: 1P1D of a tiny Llama behind `pagewire up`, with OpenAI's API too."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx2
import pytest

from tests.e2e.cluster import Cluster
from tests.ports import free_port, free_ports


@dataclass(frozen=True, slots=True)
class Served:
    """Where clients connect. The model is served as "tiny", block size 4, 256 tokens a sequence."""

    cluster: Cluster
    model: Path
    http_port: int
    metrics_port: int

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def endpoint(self, role: int) -> str:
        """Of the only worker with that role."""
        return next(worker.endpoint for worker in self.cluster.workers() if worker.role == role)

    def metrics(self, role: Literal["router", "prefill", "decode"]) -> dict[str, float]:
        """What the process has at /metrics, summed over labels."""
        port = self.metrics_port + ("router", "prefill", "decode").index(role)
        totals: dict[str, float] = {}
        for line in httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                totals[name] = totals.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return totals


@pytest.fixture(scope="session")
def client_cluster(tiny_model: Callable[..., Path]) -> Iterator[Served]:
    model, port, metrics_port = tiny_model("llama"), free_port(), free_ports(3)
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "32", "--max-num-seqs", "8", "--block-size", "4",
             "--kv-cache-memory-bytes", str(2 << 20), "--max-model-len", "256", "--cpu-threads", "1",
             "--served-model-name", "tiny", "--http-port", str(port), "--metrics-port", str(metrics_port),
             "--kv-lease-seconds", "6")  # fmt: skip
    with Cluster(model, *flags) as cluster:
        yield Served(cluster, model, port, metrics_port)


@pytest.fixture
def served(client_cluster: Served) -> Iterator[Served]:
    """The same, checked to be quiet after the test."""
    yield client_cluster
    client_cluster.cluster.wait_quiet()
