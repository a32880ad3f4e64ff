"""1P1D and two routers as processes, for everything that is put in front of, or beside, a system."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.ports import free_port

ROUTERS = ("r0", "r1")


@pytest.fixture(scope="package")
def http_ports() -> tuple[int, ...]:
    return tuple(free_port() for _ in ROUTERS)


@pytest.fixture(scope="package")
def shared_system(
    zygote: Zygote,
    tiny_model: Callable[..., Path],
    http_ports: tuple[int, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[System]:
    """1P1D and two routers that know them by address: no Redis."""
    with System(zygote, tiny_model("llama"), tmp_path_factory.mktemp("system"), None) as system:
        system.add_worker("prefill", "p0", "--kv-cache-memory-bytes", "800000")
        system.add_worker("decode", "d0", "--kv-cache-memory-bytes", "800000")
        system.start()
        workers = [f"--{role}-workers={system[name].endpoint}" for role, name in (("prefill", "p0"), ("decode", "d0"))]
        for name, http_port in zip(ROUTERS, http_ports, strict=True):
            system.add_router(name, *workers, "--http-port", str(http_port))
        system.restore()
        yield system
