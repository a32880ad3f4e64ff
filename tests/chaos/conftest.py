"""One 2P2D system with Redis for the tests that hurt it; each test ends with everything back and nothing left."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pagewire import AsyncClient
from tests.chaos.oracle import Oracle
from tests.chaos.proxy import Proxy
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.conftest import shared_memory
from tests.valkey import Server

SETTLE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Only shared memory here: processes are started again, and each system looks after its own."""
    before = shared_memory()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := shared_memory() - before:
        assert time.monotonic() < deadline, f"left behind: shared memory {left}"
        time.sleep(0.05)


@pytest.fixture
def grpc_seconds() -> float:
    """The proxies' connections belong to the system and never end with a test."""
    return 0.3


@pytest.fixture(scope="package")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="package")
def oracle(model: Path) -> Iterator[Oracle]:
    oracle = Oracle(model)
    yield oracle
    oracle.close()


@pytest.fixture(scope="package")
def redis_server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def own_redis() -> Iterator[Server]:
    """For a file's own systems: on one server, systems of the same model are one system."""
    with Server() as server:
        yield server


@pytest.fixture(scope="package")
def redis_proxy(redis_server: Server) -> Iterator[Proxy]:
    """Everybody's way to Redis."""
    with Proxy() as proxy:
        proxy.target = f"127.0.0.1:{redis_server.port}"
        yield proxy


@pytest.fixture(scope="package")
def shared_system(
    zygote: Zygote, model: Path, redis_proxy: Proxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    with System(zygote, model, tmp_path_factory.mktemp("system"), f"redis://127.0.0.1:{redis_proxy.port}") as system:
        for name in ("p0", "p1"):
            system.add_worker("prefill", name, "--kv-cache-memory-bytes", "800000")
        for name in ("d0", "d1"):
            system.add_worker("decode", name, "--kv-cache-memory-bytes", "800000")
        system.add_router("r0")
        system.restore()
        yield system


@pytest.fixture
def system(shared_system: System) -> Iterator[System]:
    """p0 p1 d0 d1 r0. What a test kills or freezes is started again; then nothing may be left."""
    yield shared_system
    try:
        shared_system.restore()
    except BaseException:
        print(shared_system.logs())
        raise


@pytest_asyncio.fixture
async def client(system: System) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(system.target) as client:
        yield client
