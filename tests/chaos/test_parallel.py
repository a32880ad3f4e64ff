"""Workers of several ranks: P and D of different sizes, and a rank that dies takes its worker down and no request."""

import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from pagewire import AsyncClient
from tests.chaos.oracle import Oracle, Stream, greedy, prompt, stream
from tests.chaos.system import System
from tests.chaos.test_death import until
from tests.chaos.zygote import Zygote
from tests.ray_cluster import two_nodes
from tests.valkey import Server

POOL = ("--kv-cache-memory-bytes", "800000")


@pytest.fixture(scope="module")
def shared_system(zygote: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """p0 and d0 have two ranks each, p1 and d1 one."""
    with (
        Server() as server,
        System(zygote, model, tmp_path_factory.mktemp("ranks"), f"redis://127.0.0.1:{server.port}") as system,
    ):
        system.add_worker("prefill", "p0", *POOL, "--tensor-parallel-size", "2")
        system.add_worker("prefill", "p1", *POOL)
        system.add_worker("decode", "d0", *POOL, "-tp", "2")
        system.add_worker("decode", "d1", *POOL)
        system.add_router("r0", "--policy", "random")
        system.restore()
        yield system


@pytest.fixture
def system(shared_system: System) -> System:
    """As the test before has left it: starting workers again takes long."""
    return shared_system


def ranks_of(system: System, name: str) -> list[psutil.Process]:
    return [each for each in psutil.Process(system[name].pid).children() if "engine.parallel.rank" in each.cmdline()]


async def test_prefill_and_decode_may_have_different_sizes(system: System, client: AsyncClient, oracle: Oracle) -> None:
    """Whoever decodes reads the blocks that the others have written."""
    seen: set[tuple[str, str]] = set()
    for number in range(40):
        result = await stream(client, prompt(60, number), **greedy(12))
        assert result.outputs == oracle(prompt(60, number), **greedy(12))
        seen.add((result.prefill_worker, result.decode_worker))
        if len(seen) == 4:
            break
    assert seen == {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")}
    classes = {each.info.worker_id: each.info.fingerprint.numerics_class for each in system.router_status("r0").workers}
    assert {name: found.rpartition("/")[2] for name, found in classes.items()} == {
        "p0": "tp2",
        "d0": "tp2",
        "p1": "tp1",
        "d1": "tp1",
    }


async def test_a_rank_that_is_killed_takes_its_worker_down_and_its_request_goes_on(
    system: System, client: AsyncClient, oracle: Oracle
) -> None:
    worker = psutil.Process(system["d0"].pid)
    (rank,) = ranks_of(system, "d0")
    killed = False

    def kill(so_far: Stream) -> None:
        nonlocal killed
        if not killed and so_far.num_tokens >= 10 and system.status("d0").num_requests:
            killed = True
            rank.send_signal(signal.SIGKILL)

    for number in range(20):  # until one is d0's
        result = await stream(client, prompt(30, 50 + number), kill, **greedy(150))
        assert result.outputs == oracle(prompt(30, 50 + number), **greedy(150))
        if killed:
            break
    assert result.decode_worker == "d1"
    await until(lambda: not system["d0"].is_running)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    log = system["d0"].log()
    assert f"rank 1 (process {rank.pid}) has died: signal SIGKILL" in log


async def test_a_killed_worker_leaves_no_rank(system: System) -> None:
    (rank,) = ranks_of(system, "p0")
    system["p0"].kill()
    await until(lambda: not alive(rank), timeout=10)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
async def test_a_rank_that_is_killed_on_another_node_moves_its_request(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """Of a Ray cluster: nothing is shared in memory with it."""
    pytest.importorskip("ray", reason="Ray is not installed (extra pagewire[ray])")
    with (
        two_nodes(),
        Server() as server,
        closing(Zygote()) as zygote,  # it has the cluster's address
        System(zygote, model, tmp_path, f"redis://127.0.0.1:{server.port}") as system,
    ):
        system.add_worker("prefill", "p0", *POOL)
        system.add_worker("decode", "d0", *POOL, "-tp", "2", "--distributed-executor-backend", "ray")
        system.add_worker("decode", "d1", *POOL)
        system.add_router("r0", "--policy", "random")
        system.restore()
        found = re.search(r"2 ranks, others are processes \[(\d+)\]", system["d0"].log())
        assert found is not None
        rank = psutil.Process(int(found[1]))
        killed = False

        def kill(so_far: Stream) -> None:
            nonlocal killed
            if not killed and so_far.num_tokens >= 10 and system.status("d0").num_requests:
                killed = True
                rank.send_signal(signal.SIGKILL)

        async with AsyncClient(system.target) as client:
            for number in range(20):  # until one is d0's
                result = await stream(client, prompt(30, number), kill, **greedy(60))
                assert result.outputs == oracle(prompt(30, number), **greedy(60))
                if killed:
                    break
        assert result.decode_worker == "d1"
        await until(lambda: not system["d0"].is_running)
        assert re.search(rf"rank 1 \(process {rank.pid} on [0-9.]+\) has died", system["d0"].log())
        system.remove("d0")


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
