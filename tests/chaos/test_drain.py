"""SIGTERM: what runs ends well, peers get what they were promised, and a whole system is restarted under load."""

import asyncio
import time
from itertools import count

import grpc
import pytest

from pagewire import AsyncClient
from pagewire.errors import PagewireError
from pagewire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.chaos.oracle import Oracle, greedy, prompt, stream
from tests.chaos.system import System
from tests.chaos.test_death import until

NUM_CLIENTS = 4
NUM_PROMPTS = 12
OPTIONS = greedy(80)


class PersistentClient:
    """What a load balancer and a patient client do: it goes to another router as long as nothing was answered."""

    def __init__(self, system: System, routers: tuple[str, ...]) -> None:
        self._system = system
        self._routers = routers
        self.num_retries = 0

    async def run(self, number: int, ids: list[int]) -> list[list[int]]:
        """The whole answer; raises what a retry cannot help."""
        for attempt in count():
            router = self._routers[(number + attempt) % len(self._routers)]
            has_begun = False

            def begin(_: object) -> None:
                nonlocal has_begun
                has_begun = True

            try:
                async with AsyncClient(self._system[router].endpoint) as client:
                    return (await stream(client, ids, begin, **OPTIONS)).outputs
            except PagewireError as error:
                if has_begun or error.code is not grpc.StatusCode.UNAVAILABLE or attempt >= 100:
                    raise
                self.num_retries += 1
                await asyncio.sleep(0.1)
        raise AssertionError("unreachable")


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_rolling_restart_under_load_loses_no_request(system: System, oracle: Oracle) -> None:
    prompts = [prompt(60, 300 + number) for number in range(NUM_PROMPTS)]
    expected = [oracle(ids, **OPTIONS) for ids in prompts]
    system.add_router("r1")
    await asyncio.to_thread(system.start, "r1")
    client = PersistentClient(system, ("r0", "r1"))
    numbers, is_over = count(), asyncio.Event()

    async def load() -> int:
        num_done = 0
        while not is_over.is_set():
            number = next(numbers)
            assert await client.run(number, prompts[number % NUM_PROMPTS]) == expected[number % NUM_PROMPTS]
            num_done += 1
        return num_done

    running = asyncio.gather(*(load() for _ in range(NUM_CLIENTS)))
    try:
        for name in ("r0", "r1", "p0", "p1", "d0", "d1"):
            await asyncio.sleep(0.5)
            started = time.monotonic()
            assert await asyncio.to_thread(system[name].terminate) == 0, system[name].log()[-3000:]
            drained = time.monotonic() - started
            assert "drain cut short" not in system[name].log()
            await asyncio.to_thread(system.start, name)
            print(f"{name}: {drained:.1f} s to drain, {time.monotonic() - started - drained:.1f} s to start")
            # As a deployment does: the next one goes when this one is in service.
            await until(lambda: _in_service(system), timeout=90)
            assert not running.done(), running.exception()
    finally:
        is_over.set()
        num_done = sum(await running)
        system.remove("r1")
    print(f"{num_done} requests, {client.num_retries} retries before a first message")
    assert num_done >= 4 * NUM_CLIENTS


def _in_service(system: System) -> bool:
    return all(sum(worker.alive for worker in system.router_status(router).workers) == 4 for router in ("r0", "r1"))


async def test_prefill_waits_until_its_kv_was_pulled(system: System, oracle: Oracle) -> None:
    """Told to end while it holds KV for a decode worker that comes late."""
    ids, options = prompt(60, 350), greedy(12)
    expected = oracle(ids, **options)
    request = types_pb2.WorkerRequest(request_id="late", prompt_token_ids=ids)
    request.sampling.CopyFrom(types_pb2.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=1, n=1))
    async with (
        grpc.aio.insecure_channel(system["p0"].endpoint) as to_prefill,
        grpc.aio.insecure_channel(system["d0"].endpoint) as to_decode,
    ):
        prefill = prefill_pb2_grpc.PrefillServiceStub(to_prefill).Prefill
        events = [event async for event in prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True))]
        info = system.status("p0").info
        pulled = system["d0"].metric("pagewire:transfer_blocks_total")
        ending = asyncio.ensure_future(asyncio.to_thread(system["p0"].terminate))
        await until(lambda: system.status("p0").load.draining)
        await asyncio.sleep(1.0)
        assert not ending.done()
        other = types_pb2.WorkerRequest(request_id="new", prompt_token_ids=ids)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await prefill(prefill_pb2.PrefillRequest(request=other, hand_off=True)).read()
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        source = decode_pb2.TransferSource(
            endpoint=info.endpoint,
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            ticket=events[0].accepted.ticket,
        )
        decode = decode_pb2_grpc.DecodeServiceStub(to_decode).Decode
        tokens = {token.index: token.token_id for token in events[-1].first_tokens.tokens}
        async for response in decode(decode_pb2.DecodeRequest(request=request, source=source)):
            if response.HasField("token"):
                tokens[response.token.index] = response.token.token_id
    assert [[tokens[index] for index in sorted(tokens)]] == expected
    assert system["d0"].metric("pagewire:transfer_blocks_total") - pulled == 15
    assert await ending == 0


async def test_decode_ends_its_streams_before_itself(system: System, oracle: Oracle) -> None:
    """Neither a migration nor a broken stream: there is time enough."""
    ids, options = prompt(50, 360), greedy(150)
    migrations = system["r0"].metric("pagewire:migrations_total")
    async with AsyncClient(system.target) as client:
        running = asyncio.ensure_future(stream(client, ids, **options))
        await until(lambda: any(system.status(name).num_requests for name in ("d0", "d1")))
        victim = "d0" if system.status("d0").num_requests else "d1"
        assert await asyncio.to_thread(system[victim].terminate) == 0
        result = await running
    assert result.outputs == oracle(ids, **options)
    assert result.decode_worker == victim
    assert system["r0"].metric("pagewire:migrations_total") == migrations
