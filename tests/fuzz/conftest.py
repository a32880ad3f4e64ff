"""1P1D and a router as real processes, to be fuzzed; at the end they are what they were."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from pagewire import Client
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.system import System
from tests.chaos.zygote import Zygote

ROLES = ("r0", "p0", "d0")
MAX_GROWTH_MIB = 96
MAX_MORE_FDS = 32
LEASE_SECONDS = 3.0
PROMPT = list(range(20, 60))


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Replaces the check of this process: gRPC's channels and the system live as long as the package."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed; `check` after each round of it."""

    system: System
    tokens: list[int]

    def check(self) -> None:
        """Every process lives, holds nothing, has met no bug, and serves the same tokens as before."""
        for name in ROLES:
            log = self.system[name].log()
            assert self.system[name].is_running, f"{name} has died:\n{log[-4000:]}"
            for sign in ("Traceback", "error id"):
                assert sign not in log, f"{name} has met a bug:\n{log[-6000:]}"
        with grpc.insecure_channel(self.system.target) as channel:  # ends pins, which hold blocks for up to a week
            admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=30)
        self.system.wait_quiet()
        assert self.generate() == self.tokens

    def generate(self) -> list[int]:
        with Client(self.system.target) as client:
            answer = client.complete(PROMPT, max_tokens=24, temperature=0.9, seed=5, ignore_eos=True, timeout=30)
        return list(answer.choices[0].token_ids)


@pytest.fixture(scope="package")
def target(
    zygote: Zygote, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with System(zygote, tiny_model("llama"), tmp_path_factory.mktemp("fuzz")) as system:
        lease = ("--kv-lease-seconds", str(LEASE_SECONDS), "--kv-max-hold-seconds", str(LEASE_SECONDS))
        system.add_worker("prefill", "p0", "--kv-cache-memory-bytes", "800000", *lease)
        system.add_worker("decode", "d0", "--kv-cache-memory-bytes", "800000", *lease)
        system.start()
        system.add_router("r0", "--prefill-workers", system["p0"].endpoint, "--decode-workers", system["d0"].endpoint)
        system.restore()
        target = Target(system, [])
        target.tokens.extend(target.generate())
        processes = {name: psutil.Process(system[name].pid) for name in ROLES}
        before = {name: (process.memory_info().rss, process.num_fds()) for name, process in processes.items()}
        yield target
        for name, (rss, num_fds) in before.items():
            growth = (processes[name].memory_info().rss - rss) / (1 << 20)
            more_fds = processes[name].num_fds() - num_fds
            print(f"{name}: {growth:.0f} MiB and {more_fds} fds more")
            assert growth < MAX_GROWTH_MIB, f"{name} grew by {growth:.0f} MiB"
            assert more_fds < MAX_MORE_FDS, f"{name} has {more_fds} fds more"
