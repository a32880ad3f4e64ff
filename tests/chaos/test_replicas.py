"""Two routers over the same workers: neither asks the other, yet what both send is shared out, or kept together."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import AsyncClient
from tests.chaos.oracle import Oracle, Stream, greedy, prompt, stream
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.valkey import Server

ROUTERS = ("r0", "r1")
PREFILLS = ("p0", "p1", "p2")
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def replicas(
    zygote: Zygote, model: Path, own_redis: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """3P1D and two routers with the default policy. Nothing is fetched, so who has a prefix is worth some waiting."""
    with System(zygote, model, tmp_path_factory.mktemp("replicas"), own_redis.url) as system:
        for name in PREFILLS:
            system.add_worker("prefill", name, "--kv-fetch", "off")
        system.add_worker("decode", "d0")
        for name in ROUTERS:
            system.add_router(name, "--kv-fetch", "off")
        system.restore()
        yield system


async def ask_both(system: System, prompts: list[list[int]]) -> list[Stream]:
    """All at the same time, every other one by the other router."""
    async with AsyncClient(system["r0"].endpoint) as first, AsyncClient(system["r1"].endpoint) as second:
        clients = [(first, second)[i % 2] for i in range(len(prompts))]
        return await asyncio.gather(
            *(stream(client, ids, **greedy(NUM_TOKENS)) for client, ids in zip(clients, prompts, strict=True))
        )


def both_have_heard(system: System) -> None:
    """Waits until every router's view has all blocks that are anywhere."""
    system.wait_quiet()
    held = sum(system.status(name).num_cached_blocks for name in (*PREFILLS, "d0"))
    deadline = time.monotonic() + 30
    while (seen := {name: system.router_status(name).num_indexed_blocks for name in ROUTERS}) != dict.fromkeys(
        ROUTERS, held
    ):
        assert time.monotonic() < deadline, f"{seen}, workers hold {held}"
        time.sleep(0.02)


async def test_a_burst_of_new_prompts_is_no_herd(replicas: System, oracle: Oracle) -> None:
    """What both routers send within milliseconds, of which neither has heard from a worker yet, is shared out."""
    prompts = [prompt(40, 500 + i) for i in range(24)]
    answers = await ask_both(replicas, prompts)
    assert [each.outputs for each in answers] == [oracle(ids, **greedy(NUM_TOKENS)) for ids in prompts]
    chosen = Counter(each.prefill_worker for each in answers)
    assert set(chosen) == set(PREFILLS), chosen
    assert max(chosen.values()) <= len(prompts) // 2, chosen
    await asyncio.to_thread(replicas.wait_quiet)


async def test_what_one_router_has_sent_the_other_finds(replicas: System, oracle: Oracle) -> None:
    """From the stream of the index, with which both go to the worker that has a prefix."""
    shared = prompt(60, 600)
    async with AsyncClient(replicas["r0"].endpoint) as client:
        holder = (await stream(client, shared, **greedy(NUM_TOKENS))).prefill_worker
    await asyncio.to_thread(both_have_heard, replicas)
    prompts = [[*shared, 5 + i] for i in range(6)]
    answers = []
    for i, ids in enumerate(prompts):  # one after the other: a worker's queue may be worth more than a prefix
        async with AsyncClient(replicas[ROUTERS[i % 2]].endpoint) as client:
            answers.append(await stream(client, ids, **greedy(NUM_TOKENS)))
    assert [each.outputs for each in answers] == [oracle(ids, **greedy(NUM_TOKENS)) for ids in prompts]
    assert {each.prefill_worker for each in answers} == {holder}
    assert all(each.num_cached_tokens == len(shared) for each in answers)
    await asyncio.to_thread(replicas.wait_quiet)
