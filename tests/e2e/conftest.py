"""A real Valkey for the session, and one 1P1D system that most tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.embedded_valkey import EmbeddedValkey
from tests.e2e.cluster import Cluster


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    server = EmbeddedValkey.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def shared_cluster(tiny_model: Callable[..., Path]) -> Iterator[Cluster]:
    """On an index of its own: systems of one model on one index are one system."""
    flags = ("--dtype", "float32", "--kernels", "reference", "--max-num-batched-tokens", "32", "--max-num-seqs", "8",
             "--block-size", "4", "--kv-cache-memory-bytes", str(2 << 20), "--max-model-len", "256",
             "--cpu-threads", "1", "--served-model-name", "tiny")  # fmt: skip
    server = EmbeddedValkey.start()
    try:
        with Cluster(tiny_model("llama"), *flags, redis_url=server.url) as cluster:
            yield cluster
    finally:
        server.stop()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """1P1D with a tiny Llama, block size 4, 256 tokens a sequence; checked to be quiet after the test."""
    yield shared_cluster
    shared_cluster.wait_quiet()
