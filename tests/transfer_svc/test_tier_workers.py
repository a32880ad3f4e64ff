"""Workers with a tier: what their pools have lost they load back, instead of computing, fetching or pulling it."""

import pytest

from engine.tiers.store_tier import StoreSettings
from kvstore.redis_index import RedisIndex
from pagewire.errors import Unavailable
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, reference, until
from tests.transfer_svc.fleet import Node, fleet
from tests.valkey import Server

PROMPT = random_prompt(7 * BLOCK_SIZE + 2, 1)
PARAMS = greedy(6)
TIERS = {"p0": {"kv_offloading_size": "1MiB"}, "d0": {"kv_offloading_size": "1MiB"}}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, [(PROMPT, PARAMS)])[0][0]


def lose(node: Node) -> None:
    """The pool has nothing of it any more, the tier has everything."""
    assert node.engine.tiers is not None
    assert node.engine.tiers.quiesce()
    node.engine.kv_cache.reset()


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_prefill_and_decode_load_what_they_have_lost(model, expected, tmp_path, tier):
    """CASES F6, F10: through P and D, cold, then warm from both tiers; nothing travels that is here."""
    disks = {name: {"kv_disk_path": str(tmp_path / name), "kv_disk_size": "4MiB"} for name in TIERS}
    async with fleet(model, ("p0", "d0"), options=TIERS if tier == "host" else disks) as workers:
        assert await workers.run("p0", "d0", PROMPT, PARAMS) == expected
        computed = workers["p0"].value("computed_prompt_tokens_total")
        pulled = workers["d0"].value("transfer_blocks_total")
        for name in ("p0", "d0"):
            lose(workers[name])
        assert await workers.run("p0", "d0", PROMPT, PARAMS) == expected
        for name in ("p0", "d0"):
            assert workers[name].value("hit_tokens_total", source=f"local_{tier}") == 7 * BLOCK_SIZE
            assert workers[name].value("hit_tokens_total", source="local_device") == 0
        assert workers["p0"].value("computed_prompt_tokens_total") - computed == 2
        assert workers["d0"].value("transfer_blocks_total") - pulled == 1
        assert workers["d0"].value("prefill_tokens_on_decode_total") == 0
        assert workers["p0"].value("kv_tier_blocks", tier=tier) == 7
        assert workers["p0"].value("kv_tier_events_total", tier=tier, event="stored") == 7


async def test_a_fetch_asks_the_own_tier_first(model, expected):
    async with fleet(model, ("p0", "d0", "d1"), options=TIERS) as workers:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS)) == expected
        lose(workers["d0"])
        hint = [workers["p0"].source()]
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint)) == expected
        assert workers["d0"].value("fetched_blocks_total") == 0
        assert workers["d0"].value("hit_tokens_total", source="local_host") == 7 * BLOCK_SIZE


async def test_reset_clears_the_tier(model):
    async with fleet(model, ("d0",), options=TIERS) as workers:
        node = workers["d0"]
        await workers.decode("d0", workers.request(PROMPT, PARAMS))
        assert node.engine.tiers.quiesce()
        await node.worker.reset_prefix_cache()
        await workers.decode("d0", workers.request(PROMPT, PARAMS))
        assert node.value("hit_tokens_total", source="local_host") == 0
        assert node.value("hit_tokens_total", source="local_device") == 0


def never_too_slow(node: Node) -> None:
    """This machine may be slow."""
    assert node.engine.tiers is not None
    assert node.engine.tiers.store is not None
    node.engine.tiers.store.settings = StoreSettings(min_deadline=60)


async def test_any_worker_loads_what_the_fleet_has_stored(model, expected):
    """From one P to another, and to a D that prefills by itself; whoever resets clears it for all."""
    with Server() as server:
        options = {name: {"kv_store_url": server.url, "kv_store_size": "4MiB"} for name in ("p0", "p1", "d0", "d1")}
        async with fleet(model, tuple(options), options=options) as workers:
            for name in options:
                never_too_slow(workers[name])
            assert await workers.run("p0", "d0", PROMPT, PARAMS) == expected
            for name, num_stored in (("p0", 7), ("d0", 1)):  # D received seven blocks and computed one
                lose(workers[name])
                assert workers[name].engine.tiers.counts()["store"][1]["stored"] == num_stored
            assert await workers.run("p1", "d1", PROMPT, PARAMS) == expected
            assert workers["p1"].value("hit_tokens_total", source="store") == 7 * BLOCK_SIZE
            assert workers["p1"].value("hit_tokens_total", source="local_device") == 0
            assert workers["p1"].value("computed_prompt_tokens_total") == 2
            assert workers["d1"].value("hit_tokens_total", source="store") == 0, "it pulls from P, which is nearer"
            assert await workers.decode("d0", workers.request(PROMPT, PARAMS)) == expected
            assert workers["d0"].value("hit_tokens_total", source="store") == 7 * BLOCK_SIZE
            lose(workers["p1"])
            stored = sum(workers[name].value("kv_tier_events_total", tier="store", event="stored") for name in options)
            assert stored >= 7
            assert workers["p0"].value("kv_tier_blocks", tier="store") >= 7
            await workers["p0"].worker.reset_prefix_cache()
            lose(workers["p1"])
            await workers.prefill("p1", workers.request(PROMPT, PARAMS))
            assert workers["p1"].value("hit_tokens_total", source="store") == 7 * BLOCK_SIZE, "no more than before"


async def test_a_reset_that_does_not_reach_the_store_says_so(model):
    with Server() as server:
        options = {"p0": {"kv_store_url": server.url, "kv_store_size": "4MiB"}}
        async with fleet(model, ("p0",), options=options) as workers:
            await workers.prefill("p0", workers.request(PROMPT, PARAMS))
            lose(workers["p0"])
            server.kill()
            with pytest.raises(Unavailable, match="not all could be erased, say it again: the store at redis://"):
                await workers["p0"].worker.reset_prefix_cache()
            with pytest.raises(Unavailable, match="not all could be erased, say it again: the store at redis://"):
                await workers["p0"].worker.prefixes.clear_tenant("a")


async def test_the_index_hears_of_tiers_from_an_idle_worker(model):
    """CASES C4: nothing runs any more when the last block is written back, and when it is cleared."""
    with Server() as server:
        async with fleet(model, ("p0",), options=TIERS, redis_url=server.url) as workers:
            node = workers["p0"]
            index = RedisIndex(server.url, node.engine.root)
            await index.start()
            keys = node.engine.kv_cache.keys_for(PROMPT)
            await workers.prefill("p0", workers.request(PROMPT, PARAMS))
            await until(lambda: index.lookup_lower(keys) == {"host": {"p0": 7}})
            lose(node)
            await node.worker.reset_prefix_cache()
            await until(lambda: index.lookup_lower(keys) == {} and index.lookup(keys) == {"p0": 0})
            await index.stop()


async def test_what_a_tier_has_is_said_before_the_first_step_and_after_a_clear(model, tmp_path):
    """No step is needed for it: a restarted worker may long be idle, and so may one that an operator clears."""
    options = {"p0": {"kv_disk_path": str(tmp_path), "kv_disk_size": "4MiB"}}
    async with fleet(model, ("p0",), options=options) as workers:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        lose(workers["p0"])
    async with fleet(model, ("p0",), options=options) as workers:
        assert workers["p0"].value("kv_tier_blocks", tier="disk") == 7
        await workers["p0"].worker.prefixes.clear_tenant("")
        assert workers["p0"].value("kv_tier_blocks", tier="disk") == 0
