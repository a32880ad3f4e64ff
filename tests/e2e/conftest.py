"""A real Valkey for the session, and one 1P1D system that most tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.embedded_valkey import EmbeddedValkey
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.e2e.cluster import Cluster


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    server = EmbeddedValkey.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def shared_cluster(
    zygote: Zygote, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """On an index of its own: systems of one model on one index are one system."""
    flags = ("--max-num-batched-tokens", "32", "--kv-cache-memory-bytes", str(2 << 20), "--max-model-len", "256")
    model, directory, server = tiny_model("llama"), tmp_path_factory.mktemp("shared"), EmbeddedValkey.start()
    try:
        with System.forked(zygote, model, directory, *flags, redis_url=server.url) as cluster:
            yield cluster
            cluster.stop()
    finally:
        server.stop()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """1P1D with a tiny Llama, block size 4, 256 tokens a sequence; checked to be quiet after the test."""
    yield shared_cluster
    shared_cluster.wait_quiet()
