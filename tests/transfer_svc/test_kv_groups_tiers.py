"""Models with sliding windows and workers with tiers: every group is loaded back, lent, pinned and moved."""

import pytest

from engine.tiers.store_tier import StoreSettings
from pagewire.prefix_control import Prefix
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, reference, until
from tests.transfer_svc.fleet import Fleet, Node, fleet
from tests.valkey import Server

PROMPT = random_prompt(9 * BLOCK_SIZE + 2, 1)
PARAMS = greedy(6)
HOST = {"kv_offloading_size": "2MiB"}


@pytest.fixture(scope="module")
def model(tiny_model):
    """Windows of 19 in three layers of four."""
    return tiny_model("gemma3")


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, [(PROMPT, PARAMS)])[0][0]


async def lose(node: Node) -> None:
    """The pool has nothing of it any more, the tiers have everything."""
    await until(lambda: node.engine.tiers.quiesce(0) and not node.engine.kv_cache.num_referenced)
    node.engine.kv_cache.reset()


async def sink(workers: Fleet, name: str) -> Node:
    await workers.prefill(name, workers.request(PROMPT, greedy(1)))
    await lose(workers[name])
    return workers[name]


async def test_prefill_and_decode_load_what_they_have_lost(model, expected):
    async with fleet(model, ("p0", "d0"), options={"p0": HOST, "d0": HOST}) as workers:
        groups = workers["p0"].engine.kv_cache.groups
        assert groups.slides
        assert await workers.run("p0", "d0", PROMPT, PARAMS) == expected
        computed = workers["p0"].value("computed_prompt_tokens_total")
        pulled = workers["d0"].value("transfer_blocks_total")
        for name in ("p0", "d0"):
            await lose(workers[name])
        assert await workers.run("p0", "d0", PROMPT, PARAMS) == expected
        for name in ("p0", "d0"):
            assert workers[name].value("hit_tokens_total", source="local_host") == 9 * BLOCK_SIZE
        assert workers["p0"].value("computed_prompt_tokens_total") - computed == 2
        assert workers["d0"].value("transfer_blocks_total") - pulled == len(groups), "the last block alone"
        assert workers["d0"].value("prefill_tokens_on_decode_total") == 0


@pytest.mark.parametrize(("on_device", "at_borrower"), [(0, 0), (4, 2), (3, 6)])
async def test_lent_from_a_tier(model, expected, on_device, at_borrower):
    """With a part on the lender's device and at the borrower; of sliding groups what a hit needs."""
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender, borrower = await sink(workers, "p0"), workers["d0"]
        groups = lender.engine.kv_cache.groups
        if on_device:
            start_load, lender.engine.tiers.start_load = lender.engine.tiers.start_load, lambda *_, **__: None
            await workers.prefill("p0", workers.request(PROMPT[: on_device * BLOCK_SIZE], greedy(1)))
            lender.engine.tiers.start_load = start_load
        if at_borrower:
            await workers.decode("d0", workers.request(PROMPT[: at_borrower * BLOCK_SIZE], greedy(1)))
        hint = [lender.source(9, num_lower_blocks=9)]
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint)) == expected
        assert borrower.value("fetch_failures_total", reason="block") == 0
        assert borrower.value("hit_tokens_total", source="remote_prefill") == (9 - at_borrower) * BLOCK_SIZE
        assert lender.value("lent_tier_blocks_total", tier="host") > 0
        await until(lambda: not lender.engine.kv_cache.num_referenced)
        assert lender.engine.kv_cache.hit_depth(lender.engine.kv_cache.keys_for(PROMPT)) == on_device
        assert borrower.engine.kv_cache.num_cached >= groups.num_hit_blocks(9)


async def test_of_all_full_groups_only_what_the_borrower_lacks_is_loaded(tiny_model):
    """Three groups keep everything, two slide; the lender's device has less than the borrower."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = tiny_model("gemma3", num_hidden_layers=5, layer_types=kinds)
    expected = reference(model, [(PROMPT, PARAMS)])[0][0]
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender, borrower = await sink(workers, "p0"), workers["d0"]
        chain = lender.engine.tiers.chain
        assert (chain.num_full, len(chain.groups)) == (3, 5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lender.engine.tiers, "start_load", lambda *_, **__: None)
            await workers.prefill("p0", workers.request(PROMPT[: 3 * BLOCK_SIZE], greedy(1)))
        await workers.decode("d0", workers.request(PROMPT[: 6 * BLOCK_SIZE], greedy(1)))
        hint = [lender.source(9, num_lower_blocks=9)]
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint)) == expected
        assert borrower.value("hit_tokens_total", source="remote_prefill") == 3 * BLOCK_SIZE
        assert lender.value("lent_tier_blocks_total", tier="host") == 3 * 3 + chain.num_windows(9)


async def test_a_damaged_window_is_not_lent(model, expected):
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers:
        lender = await sink(workers, "p0")
        tiers, cache = lender.engine.tiers, lender.engine.kv_cache
        name = tiers.chain.name(cache.keys_for(PROMPT)[8], cache.groups.num_full)
        entry = tiers.tiers[0]._book._entries[name]
        tiers.tiers[0].slots.buffer[entry.slot, 3] ^= 1
        hint = [lender.source(9, num_lower_blocks=9)]
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint)) == expected
        assert tiers.num_corrupt["host"] == 1
        await until(lambda: not cache.num_referenced)


async def test_pins_bring_up_and_keep_every_group(model):
    async with fleet(model, ("p0",), options={"p0": HOST}) as workers:
        node = await sink(workers, "p0")
        prefixes, prefix, groups = node.app.worker.prefixes, Prefix(tuple(PROMPT)), node.engine.kv_cache.groups
        holding = await prefixes.pin(prefix, 60)
        assert holding.num_blocks == {"device": 9, "host": 9}
        assert holding.num_pinned_blocks == {"device": 9, "host": 9}
        assert node.engine.kv_cache.num_referenced == prefixes.num_pinned_blocks == groups.num_hit_blocks(9)
        (tier,) = node.engine.tiers.tiers
        assert tier._book.num_pinned(0.0) == groups.num_hit_blocks(9)
        assert await prefixes.clear(prefix, 5) > 0
        assert (await prefixes.look_up(prefix)).num_blocks == {"device": 0, "host": 5}, "only the tier has that window"
        await prefixes.clear_tenant("")
        assert tier.num_ready == node.engine.kv_cache.num_cached == node.engine.kv_cache.num_referenced == 0


async def test_a_move_takes_it_from_below(model, expected):
    async with fleet(model, ("p0", "d0"), options={"p0": HOST, "d0": HOST}) as workers:
        node = await sink(workers, "p0")
        moved = await workers["d0"].app.worker.prefixes.bring(Prefix(tuple(PROMPT)), [node.source(9)])
        assert moved.num_blocks == moved.num_moved_blocks == 9
        await node.app.worker.prefixes.remove_moved(Prefix(tuple(PROMPT)), 8)
        assert (await node.app.worker.prefixes.look_up(Prefix(tuple(PROMPT)))).num_blocks == {"device": 0, "host": 0}
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS)) == expected
        assert workers["d0"].value("prefill_tokens_on_decode_total") == 2


async def test_a_fleet_shares_every_group(model, expected):
    with Server() as server:
        store = {"kv_store_url": server.url, "kv_store_size": "16MiB"}
        async with fleet(model, ("p0", "d0"), options={"p0": store, "d0": store}) as workers:
            first, second = workers["p0"], workers["d0"]
            second.engine.tiers.store.settings = StoreSettings(min_deadline=60)
            await workers.prefill("p0", workers.request(PROMPT, greedy(1)))
            await until(lambda: first.engine.tiers.quiesce(0))
            assert await workers.decode("d0", workers.request(PROMPT, PARAMS)) == expected
            assert second.value("hit_tokens_total", source="store") == 9 * BLOCK_SIZE
            await until(lambda: second.engine.tiers.quiesce(0))
            assert await first.app.worker.prefixes.clear(Prefix(tuple(PROMPT)), 0) > 0
            assert first.engine.tiers.store.counts()[0] > 0
            second.engine.kv_cache.reset()
            assert await workers.decode("d0", workers.request(PROMPT, PARAMS)) == expected
            assert second.value("hit_tokens_total", source="store") == 9 * BLOCK_SIZE, "it is gone there"
