"""What lies between prefill and decode is slow, frozen or cut; small pools; short leases. 1P1D without Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pagewire import AsyncClient
from pagewire.errors import PagewireError
from pagewire.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.chaos.oracle import Oracle, greedy, prompt, stream
from tests.chaos.proxy import Proxy
from tests.chaos.system import System
from tests.chaos.test_death import until
from tests.chaos.zygote import Zygote
from tests.ports import free_port

LEASE_SECONDS = 4.0
P_BLOCKS, D_BLOCKS = 40, 64
BLOCK_BYTES = 3072
P_MAX_LEN = 120  # tokens; a decode worker takes 200


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with Proxy(piece=4096) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def narrow_system(
    zygote: Zygote, model: Path, proxy: Proxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """Everything that anybody says to the prefill worker goes through the proxy; blocks travel in frames."""
    with System(zygote, model, tmp_path_factory.mktemp("narrow")) as system:
        system.add_worker(
            "prefill", "p0", "--advertise", f"127.0.0.1:{proxy.port}", "--kv-transfer", "grpc",
            "--kv-lease-seconds", str(LEASE_SECONDS), "--kv-max-hold-seconds", str(LEASE_SECONDS),
            "--kv-cache-memory-bytes", str(P_BLOCKS * BLOCK_BYTES), "--max-model-len", str(P_MAX_LEN),
        )  # fmt: skip
        system.add_worker(
            "decode", "d0", "--kv-cache-memory-bytes", str(D_BLOCKS * BLOCK_BYTES), "--max-model-len", "200"
        )
        system["p0"].port = free_port()
        proxy.target = system["p0"].endpoint
        system.start()
        system.add_router(
            "r0", "--prefill-workers", f"127.0.0.1:{proxy.port}", "--decode-workers", system["d0"].endpoint
        )
        system.restore()
        yield system


@pytest.fixture
def system(narrow_system: System, proxy: Proxy) -> Iterator[System]:
    yield narrow_system
    proxy.delay, proxy.closed = 0.0, False
    proxy.thaw()
    try:
        narrow_system.restore()
    except BaseException:
        print(narrow_system.logs())
        raise


@pytest_asyncio.fixture
async def client(system: System) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(system.target) as client:
        yield client


async def cancelled(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class MidPull:
    """True while a pull is in its middle: made before the request, asked until it is so."""

    def __init__(self, system: System, proxy: Proxy) -> None:
        self._system = system
        self._proxy = proxy
        self._num_bytes = proxy.num_bytes

    def __call__(self) -> bool:
        passed = self._proxy.num_bytes - self._num_bytes
        return passed > 24_000 and self._system.status("d0").load.num_transfers > 0


async def test_a1_abort_while_prefill_does_not_answer(system: System, client: AsyncClient, proxy: Proxy) -> None:
    running = asyncio.ensure_future(stream(client, prompt(100, 1), **greedy(20)))
    await until(lambda: system.status("d0").load.num_transfers)
    proxy.freeze()
    await asyncio.sleep(0.05)
    await cancelled(running)
    # Nothing will ever come from prefill: decode's blocks are back all the same.
    await until(lambda: not system.status("d0").num_referenced_blocks)
    proxy.thaw()  # what was under way comes late, and is dropped
    await until(lambda: not system.status("p0").num_referenced_blocks)


async def test_a2_client_leaves_before_decode_has_the_kv(system: System, client: AsyncClient) -> None:
    """Far below the lease: the router tells prefill."""
    system["d0"].freeze()
    running = asyncio.ensure_future(stream(client, prompt(60, 2), **greedy(20)))
    await until(lambda: any(ticket.state == "leased" for ticket in system.status("p0").tickets))
    await cancelled(running)
    started = time.monotonic()
    await until(lambda: not system.status("p0").num_referenced_blocks)
    assert time.monotonic() - started < LEASE_SECONDS / 2
    system["d0"].thaw()


async def test_a4_blocks_of_an_aborted_transfer_are_not_written_late(
    system: System, client: AsyncClient, proxy: Proxy, oracle: Oracle
) -> None:
    """A is aborted while its blocks crawl; B gets the same blocks of decode's pool."""
    proxy.delay = 0.05
    pulls = MidPull(system, proxy)
    first = asyncio.ensure_future(stream(client, prompt(110, 3), **greedy(40)))
    await until(pulls)
    await cancelled(first)
    proxy.delay = 0.01
    others = [stream(client, prompt(70, 4 + i), **greedy(12)) for i in range(3)]
    for i, result in enumerate(await asyncio.gather(*others)):
        assert result.outputs == oracle(prompt(70, 4 + i), **greedy(12))


async def test_a8_a_pool_full_of_kv_that_nobody_pulls(system: System, client: AsyncClient, oracle: Oracle) -> None:
    """No new request is needed to end the leases; the one that waits finishes after them."""
    async with grpc.aio.insecure_channel(system["p0"].endpoint) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        for number in range(2):
            ids = prompt(76, 10 + number)
            request = types_pb2.WorkerRequest(request_id=f"left-{number}", prompt_token_ids=ids)
            request.sampling.seed = 1
            async for _ in stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True)):
                pass
    assert system.status("p0").load.num_free_blocks < 10
    result = await stream(client, prompt(80, 12), **greedy(8))
    assert result.outputs == oracle(prompt(80, 12), **greedy(8))
    assert result.prefill_worker == "p0"


async def test_a_connection_that_is_cut_in_mid_pull(
    system: System, client: AsyncClient, proxy: Proxy, oracle: Oracle
) -> None:
    proxy.delay = 0.05
    pulls = MidPull(system, proxy)
    running = asyncio.ensure_future(stream(client, prompt(110, 20), **greedy(12)))
    await until(pulls)
    proxy.cut()
    proxy.delay = 0.0
    assert (await running).outputs == oracle(prompt(110, 20), **greedy(12))


async def test_a_connection_that_freezes_in_mid_pull(
    system: System, client: AsyncClient, proxy: Proxy, oracle: Oracle
) -> None:
    """Nothing breaks; the heartbeat is not answered, and decode computes the rest."""
    proxy.delay = 0.05
    pulls = MidPull(system, proxy)
    running = asyncio.ensure_future(stream(client, prompt(110, 21), **greedy(12)))
    await until(pulls)
    proxy.freeze()
    await asyncio.sleep(0.3)
    assert pulls()
    started = time.monotonic()
    assert (await running).outputs == oracle(prompt(110, 21), **greedy(12))
    print(f"a frozen pull was given up after {time.monotonic() - started:.1f} s")


async def test_b4_prefill_stops_when_the_client_leaves(system: System, client: AsyncClient, oracle: Oracle) -> None:
    """Many long prompts are cancelled before their first token; a short one does not queue behind them."""
    expected = oracle(prompt(8, 30), **greedy(4))
    running = [asyncio.ensure_future(stream(client, prompt(110, 31 + i), **greedy(20))) for i in range(6)]
    await until(lambda: system.status("p0").num_requests)
    await asyncio.gather(*(cancelled(task) for task in running))
    num_steps = system["p0"].metric("pagewire:step_seconds_count")
    assert (await stream(client, prompt(8, 30), **greedy(4))).outputs == expected
    # Six prompts of 110 tokens are more than 40 steps of 16.
    assert system["p0"].metric("pagewire:step_seconds_count") - num_steps < 20


async def test_b8_longer_than_prefill_takes_but_not_decode(system: System, client: AsyncClient, oracle: Oracle) -> None:
    """Decode does it alone; it must not go on after a prefill that was refused."""
    result = await stream(client, prompt(P_MAX_LEN + 20, 40), **greedy(8))
    assert result.outputs == oracle(prompt(P_MAX_LEN + 20, 40), **greedy(8))
    assert result.prefill_worker == result.decode_worker == "d0"


@pytest.mark.parametrize("num_requests", [32, pytest.param(64, marks=pytest.mark.nightly)])
async def test_b11_many_requests_on_small_pools(
    system: System, client: AsyncClient, oracle: Oracle, num_requests: int
) -> None:
    """Each ends with its tokens or RESOURCE_EXHAUSTED; nobody hangs."""
    wanted = [(prompt(10 + 7 * (i % 12), 50 + i), greedy(4 + i % 9)) for i in range(num_requests)]
    results = await asyncio.gather(
        *(stream(client, ids, **options, timeout=60) for ids, options in wanted), return_exceptions=True
    )
    num_done = 0
    for (ids, options), result in zip(wanted, results, strict=True):
        if isinstance(result, PagewireError):
            assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            assert not isinstance(result, BaseException), result
            assert result.outputs == oracle(ids, **options)
            num_done += 1
    assert num_done >= num_requests // 2


async def test_e1_larger_than_any_pool_is_refused_at_once(system: System, client: AsyncClient, oracle: Oracle) -> None:
    started = time.monotonic()
    with pytest.raises(PagewireError, match="at most 199 fit") as refusal:
        await stream(client, prompt(220, 60), **greedy(4))
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert time.monotonic() - started < 10
    assert (await stream(client, prompt(8, 61), **greedy(4))).outputs == oracle(prompt(8, 61), **greedy(4))
