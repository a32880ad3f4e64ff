"""What a worker has only in host memory or on disk, others fetch too: verified, leased, and nobody's cache changes."""

import asyncio
import threading

import pytest

from engine.rates import Rate
from tests.decode_svc.harness import BLOCK_SIZE, NIXL, greedy, random_prompt, reference, until
from tests.transfer_svc.fleet import Fleet, Node, fleet
from transfer_svc.lender import LendLimits

PROMPT = random_prompt(7 * BLOCK_SIZE + 2, 1)
PARAMS = greedy(6)
HOST = {"kv_offloading_size": "1MiB"}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, [(PROMPT, PARAMS)])[0][0]


async def sink(workers: Fleet, name: str, prompt=PROMPT) -> Node:
    """The worker computes the prompt; afterwards only its tiers have it."""
    node = workers[name]
    await workers.prefill(name, workers.request(prompt, greedy(1)))
    await until(lambda: node.engine.tiers.quiesce(0) and not node.engine.kv_cache.num_referenced)
    node.engine.kv_cache.reset()
    return node


def below(node: Node, num_blocks: int = 7):
    return node.source(num_blocks, num_lower_blocks=num_blocks)


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm_vm", "shm_ring", NIXL])
async def test_from_host_memory(model, expected, plane):
    async with fleet(model, ("p0", "p1", "d0"), plane=plane, options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        hint = [below(lender)]
        (first,) = (await workers.prefill("p1", workers.request(PROMPT, PARAMS, hint))).tokens
        assert first.token_id == expected[0]
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint)) == expected
        for name in ("p1", "d0"):
            assert workers[name].value("hit_tokens_total", source="remote_prefill") == 7 * BLOCK_SIZE
        assert lender.value("lent_tier_blocks_total", tier="host") == 14
        assert lender.engine.kv_cache.num_cached == 0, "lent blocks are not cached"
        await until(lambda: not lender.engine.kv_cache.num_referenced)


async def test_from_a_disk(model, expected, tmp_path):
    options = {"p0": {"kv_disk_path": str(tmp_path), "kv_disk_size": "4MiB"}}
    async with fleet(model, ("p0", "d0"), options=options) as workers:
        lender = await sink(workers, "p0")
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 7
        assert lender.value("lent_tier_blocks_total", tier="disk") == 7


@pytest.mark.parametrize(("on_device", "at_borrower", "num_loaded"), [(3, 0, 4), (3, 2, 4), (2, 5, 2), (0, 5, 2)])
async def test_device_tier_and_borrower_have_parts(model, expected, on_device, at_borrower, num_loaded):
    """Only what is missing is loaded, and lent."""
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        if on_device:
            keep = PROMPT[: on_device * BLOCK_SIZE]
            lender.engine.tiers.start_load = _nothing  # it computes them
            await workers.prefill("p0", workers.request(keep, greedy(1)))
            del lender.engine.tiers.start_load
        if at_borrower:
            await workers.decode("d0", workers.request(PROMPT[: at_borrower * BLOCK_SIZE], greedy(1)))
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 7 - at_borrower
        assert lender.value("lent_tier_blocks_total", tier="host") == num_loaded
        await until(lambda: not lender.engine.kv_cache.num_referenced)
        assert lender.engine.kv_cache.num_cached == on_device


def _nothing(*arguments, **more):
    return None


async def test_what_is_lent_outlives_its_tier(model, expected, monkeypatch):
    """Between the loan and the pull the tier is cleared and filled with something else."""
    async with fleet(model, ("p0", "d0"), options={"p0": {"kv_offloading_size": "64KiB"}}) as workers:
        lender = await sink(workers, "p0")
        lend = lender.worker.lender.lend

        async def clear_after(*arguments, **more):
            ticket = await lend(*arguments, **more)
            lender.engine.tiers.clear()
            lender.engine.tiers.tiers[0].slots.buffer[:] = 0xAA
            return ticket

        monkeypatch.setattr(lender.worker.lender, "lend", clear_after)
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 7


async def test_a_corrupt_block_is_not_lent_nor_what_follows(model, expected):
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        (tier,) = lender.engine.tiers.tiers
        entry = tier.read(lender.engine.kv_cache.keys_for(PROMPT)[3])
        tier.slots.buffer[entry.slot, 5] ^= 1
        tier.release([entry])
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 3
        assert lender.engine.tiers.counts()["host"][1]["corrupt"] == 1


async def test_a_borrower_that_leaves_while_the_tier_is_read(model, expected, monkeypatch):
    """The slots are held meanwhile, and the blocks are given back when nobody writes to them."""
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        (tier,) = lender.engine.tiers.tiers
        arrived, may_read, read = threading.Event(), threading.Event(), tier.slots.read

        def slow_read(entry, target):
            arrived.set()
            assert may_read.wait(60)
            read(entry, target)

        monkeypatch.setattr(tier.slots, "read", slow_read)
        asking = asyncio.create_task(workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])))
        await until(arrived.is_set)
        assert lender.engine.kv_cache.num_referenced == 7
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        may_read.set()
        await until(lambda: not lender.engine.kv_cache.num_referenced)
        lender.engine.tiers.check_integrity()
        monkeypatch.undo()
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected


async def test_the_limits_are_looked_at_again_after_a_load_that_brought_nothing(model, expected, monkeypatch):
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        with monkeypatch.context() as patch:
            patch.setattr(lender.engine.tiers, "start_load", _nothing)
            await workers.prefill("p0", workers.request(PROMPT[: 3 * BLOCK_SIZE], greedy(1)))
        (tier,) = lender.engine.tiers.tiers

        def others_were_lent_all_meanwhile(entry, target):
            lender.worker.lender._limits = LendLimits(max_tickets=0)
            raise OSError("it cannot be read")

        monkeypatch.setattr(tier.slots, "read", others_were_lent_all_meanwhile)
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 0
        assert workers["d0"].value("fetch_failures_total", reason="refused") == 1
        await until(lambda: not lender.engine.kv_cache.num_referenced)


async def test_a_lender_without_room_lends_what_its_device_has(model, expected, monkeypatch):
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        monkeypatch.setattr(lender.worker.lender, "_num_spare", lambda: 0)
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 0
        assert workers["d0"].value("fetch_failures_total", reason="gone") == 1


@pytest.mark.parametrize(("mode", "num_fetched"), [("always", 7), ("auto", 0)])
async def test_always_reaches_the_lenders_tiers(model, expected, monkeypatch, mode, num_fetched):
    """What is dearer to load than to compute is loaded for a borrower that never asks what it costs."""
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}, mode=mode) as workers:
        lender = await sink(workers, "p0")
        lender.engine.tiers.costs["host"].prefill = Rate(1e12, 1e9)
        monkeypatch.setattr(workers["d0"].worker.fetcher.rates, "prefill", Rate(1e-3, 1e9))  # to d0 it is cheap
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [below(lender)])) == expected
        assert workers["d0"].value("fetched_blocks_total") == num_fetched
        assert lender.engine.tiers.counts()["host"][1]["declined"] == 7 - num_fetched
        lost = (7 - num_fetched) * BLOCK_SIZE
        assert workers["d0"].value("unfetched_tokens_total", reason="gone") == lost


async def test_another_tenant_borrows_nothing(model, expected):
    """CASES D5: the salt is in the keys of every tier."""
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        request = workers.request(PROMPT, PARAMS, [below(lender)], salt="b")
        assert await workers.decode("d0", request) == expected
        assert workers["d0"].value("fetched_blocks_total") == 0
