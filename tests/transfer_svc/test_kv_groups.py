"""Models with sliding windows: a worker fetches, and operators pin and move, what a sequence needs to go on."""

import pytest

from pagewire.prefix_control import Prefix
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, reference, until
from tests.transfer_svc.fleet import fleet
from transfer_svc.prefix_transfers import FetchFailed

PROMPT = random_prompt(9 * BLOCK_SIZE + 2, 1)
PARAMS = greedy(6)


@pytest.fixture(scope="module")
def model(tiny_model):
    """Windows of 19 in three layers of four."""
    return tiny_model("gemma3")


async def test_from_any_worker_to_any_worker(model):
    (((*expected,),),) = reference(model, [(PROMPT, PARAMS)])
    async with fleet(model, ("p0", "p1", "d0", "d1"), plane="grpc") as workers:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        hint = [workers["p0"].source()]
        (first,) = (await workers.prefill("p1", workers.request(PROMPT, PARAMS, hint))).tokens
        assert first.token_id == expected[0], "P to P"
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint)) == expected, "P to D"
        assert await workers.decode("d1", workers.request(PROMPT, PARAMS, [workers["d0"].source()])) == expected, (
            "D to D"
        )
        groups = workers["p1"].engine.kv_cache.groups
        for name in ("p1", "d0", "d1"):
            node = workers[name]
            assert node.value("fetched_blocks_total") == groups.num_hit_blocks(9) < 9 * len(groups)
            assert node.value("computed_prompt_tokens_total") == 2
            assert node.value("fetch_failures_total", reason="block") == 0


async def test_a_turn_later(model):
    """Where a fetched prefix ends is not where its next turn's ends."""
    answers, history = [], list(PROMPT)
    for turn in range(3):
        answers.append(reference(model, [(history, greedy(9))])[0][0])
        history += answers[-1] + random_prompt(5, turn)
    async with fleet(model, ("p0", "p1", "d0", "d1")) as workers:
        history = list(PROMPT)
        for turn, answer in enumerate(answers):
            before = [workers[f"{role}{(turn - 1) % 2}"].source() for role in "dp"] if turn else []
            computed = workers[f"p{turn % 2}"].value("computed_prompt_tokens_total")
            assert await workers.run(f"p{turn % 2}", f"d{turn % 2}", history, greedy(9), before) == answer
            if turn:
                held = (len(history) - 5 - 1) // BLOCK_SIZE * BLOCK_SIZE
                now = workers[f"p{turn % 2}"].value("computed_prompt_tokens_total")
                assert now - computed == len(history) - held
            history += answer + random_prompt(5, turn)


async def test_nothing_is_fetched_where_all_layers_slide(tiny_model, caplog):
    model = tiny_model("mistral")
    (((*expected,),),) = reference(model, [(PROMPT, PARAMS)])
    async with fleet(model, ("p0", "d0")) as workers:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [workers["p0"].source()])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 0
    assert caplog.text.count("nothing is fetched from other workers: every layer") == 2


async def test_a_pin_holds_what_a_hit_needs(model):
    async with fleet(model, ("p0",)) as workers:
        node = workers["p0"]
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        admin = admin_pb2_grpc.AdminServiceStub(node.channel)
        prefixes, prefix = node.app.worker.prefixes, Prefix(tuple(PROMPT))
        holding = await prefixes.pin(prefix, 60)
        assert holding.num_blocks["device"] == holding.num_pinned_blocks["device"] == 9
        groups = node.engine.kv_cache.groups
        assert node.engine.kv_cache.num_referenced == prefixes.num_pinned_blocks == groups.num_hit_blocks(9)
        await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert (await prefixes.look_up(prefix)).num_blocks["device"] == 0
        assert node.engine.kv_cache.num_referenced == node.engine.kv_cache.stats().num_cached == 0


async def test_a_pin_is_whole_if_others_came_meanwhile(model, monkeypatch):
    """A chain's blocks begin with the windows': cut off at the limit, group 0 would lack its end."""
    other = random_prompt(9 * BLOCK_SIZE + 2, 2)
    async with fleet(model, ("p0",), options={"p0": {"num_blocks": 24, "max_model_len": 96}}) as workers:
        node, size = workers["p0"], BLOCK_SIZE
        for prompt in (PROMPT, other):
            await workers.prefill("p0", workers.request(prompt, PARAMS))
        cache, prefixes = node.engine.kv_cache, node.app.worker.prefixes
        load, others = prefixes._load, [other]

        async def slow(prefix, keys, start):
            while others:
                await prefixes.pin(Prefix(tuple(others.pop())), 60)
            return await load(prefix, keys, start)

        monkeypatch.setattr(prefixes, "_load", slow)
        holding = await prefixes.pin(Prefix(tuple(PROMPT)), 60)
        pin = prefixes._pins[cache.keys_for(PROMPT)[-1]]
        assert 0 < holding.num_pinned_blocks["device"] == pin.depth < 9
        assert len(pin.block_ids) == cache.groups.num_hit_blocks(pin.depth)
        assert prefixes.num_pinned_blocks <= prefixes._most_pinned()
        prefixes.unpin_all()
        held = cache.match_groups(cache.keys_for(PROMPT)[: pin.depth], PROMPT[: pin.depth * size])
        assert held[0].end == pin.depth
        for blocks in held:
            cache.release(blocks.block_ids)


async def test_a_fetch_that_breaks_off_loses_nothing(model, monkeypatch):
    """Five of nine blocks were here; the pull of the rest aimed at other windows and brought nothing."""
    (((*expected,),),) = reference(model, [(PROMPT, PARAMS)])
    async with fleet(model, ("p0", "p1")) as workers:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        await workers.prefill("p1", workers.request(PROMPT[: 5 * BLOCK_SIZE + 1], PARAMS))
        node, numbers = workers["p1"], []
        fetcher, fetch = node.worker.fetcher, node.worker.fetcher.fetch

        async def breaks(*_):
            raise FetchFailed("peer", "gone")

        async def watched(*arguments):
            numbers.append(await fetch(*arguments))
            return numbers[-1]

        monkeypatch.setattr(fetcher._transfers, "_pull", breaks)
        monkeypatch.setattr(fetcher, "fetch", watched)
        before = node.value("computed_prompt_tokens_total")
        answer = await workers.prefill("p1", workers.request(PROMPT, PARAMS, [workers["p0"].source()]))
        assert answer.tokens[0].token_id == expected[0]
        assert numbers == [0]
        assert node.value("fetch_failures_total", reason="peer") == 1
        assert node.value("unfetched_tokens_total", reason="peer") == 4 * BLOCK_SIZE
        assert node.value("computed_prompt_tokens_total") - before == len(PROMPT) - 5 * BLOCK_SIZE


async def test_held_blocks_are_told_in_the_units_of_free_ones(model):
    async with fleet(model, ("p0",)) as workers:
        worker, cache = workers["p0"].worker, workers["p0"].engine.kv_cache
        await workers.prefill("p0", workers.request(PROMPT, PARAMS), hand_off=True)
        await until(lambda: worker.leases.num_held_blocks == cache.num_referenced)  # the checksums are computed
        load = worker.load()
        assert 0 < load.num_held_blocks < worker.leases.num_held_blocks
        assert cache.capacity - 1 <= load.num_held_blocks + load.num_free_blocks <= cache.capacity + 1
        worker.sender.drop_all("nobody comes")
        assert worker.load().num_held_blocks == 0
