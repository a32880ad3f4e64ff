"""One real system for all clients: 1P1D of a tiny Llama, with OpenAI's API too."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx2
import pytest

from kvstore.embedded_valkey import EmbeddedValkey
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.ports import free_port

Role = Literal["router", "prefill", "decode"]
SERVICES: dict[Role, str] = {"router": "router", "prefill": "prefill-0", "decode": "decode-0"}


@dataclass(frozen=True, slots=True)
class Served:
    """Where clients connect. The model is served as "tiny", block size 4, 256 tokens a sequence."""

    cluster: System
    model: Path
    http_port: int

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def endpoint(self, role: int) -> str:
        """Of the only worker with that role."""
        return next(worker.endpoint for worker in self.cluster.workers() if worker.role == role)

    def metrics_port(self, role: Role) -> int:
        """Where that role's only process has /metrics."""
        return self.cluster[SERVICES[role]].metrics_port

    def metrics(self, role: Role) -> dict[str, float]:
        """What the process has there, summed over labels."""
        port = self.metrics_port(role)
        totals: dict[str, float] = {}
        for line in httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                totals[name] = totals.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return totals


@pytest.fixture(scope="session")
def client_cluster(
    zygote: Zygote, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model, port, server = tiny_model("llama"), free_port(), EmbeddedValkey.start()
    flags = ("--kernels", "auto", "--max-num-batched-tokens", "32", "--kv-cache-memory-bytes", str(2 << 20),
             "--max-model-len", "256", "--kv-lease-seconds", "6")  # fmt: skip
    http, directory = ("--http-port", str(port)), tmp_path_factory.mktemp("clients")
    try:
        with System.forked(zygote, model, directory, *flags, redis_url=server.url, router=http) as cluster:
            yield Served(cluster, model, port)
            cluster.stop()
    finally:
        server.stop()


@pytest.fixture
def served(client_cluster: Served) -> Iterator[Served]:
    """The same, checked to be quiet after the test."""
    yield client_cluster
    client_cluster.cluster.wait_quiet()
