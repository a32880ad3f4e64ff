"""Models with sliding windows: a worker fetches, and operators pin and move, what a sequence needs to go on."""

import pytest

from pagewire.prefix_control import Prefix
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, reference
from tests.transfer_svc.fleet import fleet

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


async def test_nothing_is_fetched_where_all_layers_slide(tiny_model):
    model = tiny_model("mistral")
    (((*expected,),),) = reference(model, [(PROMPT, PARAMS)])
    async with fleet(model, ("p0", "d0")) as workers:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, [workers["p0"].source()])) == expected
        assert workers["d0"].value("fetched_blocks_total") == 0


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
