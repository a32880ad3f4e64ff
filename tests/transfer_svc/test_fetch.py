"""KV moves to the work: whoever has to prefill takes cached blocks from any worker, and every token stays the same."""

import pytest

from pagewire.v1 import types_pb2
from tests.decode_svc.harness import BLOCK_SIZE, NIXL, greedy, random_prompt, reference
from tests.transfer_svc.fleet import fleet

PROMPT = random_prompt(7 * BLOCK_SIZE + 2, 1)
PARAMS = greedy(6)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, [(PROMPT, PARAMS)])[0][0]


async def warm(workers, name):
    """Puts the prompt's KV into a worker's cache."""
    if name.startswith("p"):
        await workers.prefill(name, workers.request(PROMPT, PARAMS))
    else:
        await workers.decode(name, workers.request(PROMPT, PARAMS))


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm_vm", "shm_map", "shm_ring", NIXL])
async def test_from_any_worker_to_any_worker(model, expected, plane):
    async with fleet(model, ("p0", "p1", "d0", "d1"), plane=plane) as workers:
        await warm(workers, "p0")
        hint = [workers["p0"].source()]
        (first,) = (await workers.prefill("p1", workers.request(PROMPT, PARAMS, hint))).tokens
        assert first.token_id == expected[0], "P to P"
        assert workers["p1"].value("computed_prompt_tokens_total") == 2
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint)) == expected, "P to D"
        assert await workers.decode("d1", workers.request(PROMPT, PARAMS, [workers["d0"].source()])) == expected, (
            "D to D"
        )
        for name, origin in (("p1", "prefill"), ("d0", "prefill"), ("d1", "decode")):
            node = workers[name]
            assert node.value("fetched_blocks_total") == 7
            assert node.value("fetched_bytes_total") == 7 * node.app.description.fingerprint.block_bytes[0]
            assert node.value("hit_tokens_total", source=f"remote_{origin}") == 7 * BLOCK_SIZE
            assert node.value("fetch_failures_total", reason="block") == 0
            assert node.value("hit_tokens_total", source="local_device") == 0
        assert workers["d1"].value("prefill_tokens_on_decode_total") == 2


async def test_the_next_turn_takes_the_last_one_from_the_decode_worker_that_ran_it(model):
    answers, history = [], list(PROMPT)
    for turn in range(3):
        answers.append(reference(model, [(history, greedy(9))])[0][0])
        history += answers[-1] + random_prompt(5, turn)
    async with fleet(model, ("p0", "p1", "d0", "d1")) as workers:
        history = list(PROMPT)
        for turn, answer in enumerate(answers):
            p, d, before = f"p{turn % 2}", f"d{turn % 2}", f"d{(turn - 1) % 2}"
            hint = [workers[before].source(), workers[f"p{(turn - 1) % 2}"].source()] if turn else []
            computed = workers[p].value("computed_prompt_tokens_total")
            assert await workers.run(p, d, history, greedy(9), hint) == answer
            if turn:  # the last turn's last token has no KV yet
                held = (len(history) - 5 - 1) // BLOCK_SIZE * BLOCK_SIZE
                assert workers[p].value("computed_prompt_tokens_total") - computed == len(history) - held
            assert workers[d].value("prefill_tokens_on_decode_total") == 0
            history += answer + random_prompt(5, turn)


async def test_what_is_here_is_not_fetched_again(model, expected):
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers, "p0")
        await workers.prefill("p1", workers.request(PROMPT[: 3 * BLOCK_SIZE], PARAMS))
        again = await workers.prefill("p1", workers.request(PROMPT, PARAMS, [workers["p0"].source()]))
        assert again.tokens[0].token_id == expected[0]
        assert again.num_cached_tokens == 7 * BLOCK_SIZE
        node = workers["p1"]
        assert node.value("fetched_tokens_total", source="remote_prefill") == 4 * BLOCK_SIZE
        assert node.value("hit_tokens_total", source="local_device") == 3 * BLOCK_SIZE


async def test_another_tenant_finds_nothing(model, expected):
    async with fleet(model, ("p0", "p1")) as workers:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS, salt="alice"))
        got = await workers.prefill("p1", workers.request(PROMPT, PARAMS, [workers["p0"].source()], salt="bob"))
        assert (got.tokens[0].token_id, got.num_cached_tokens) == (expected[0], 0)
        assert workers["p1"].value("fetch_failures_total", reason="gone") == 1
        got = await workers.prefill("p1", workers.request(PROMPT, PARAMS, [workers["p0"].source()], salt="alice"))
        assert got.num_cached_tokens == 7 * BLOCK_SIZE


async def test_a_worker_said_to_hold_as_much_asks_nobody(model, expected):
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers, "p0")
        hint = [workers["p0"].source(7), workers["p1"].source(7)]
        got = await workers.prefill("p1", workers.request(PROMPT, PARAMS, hint))
        assert got.tokens[0].token_id == expected[0]
        assert len(workers["p1"].worker.peers) == 0


async def test_lengths_around_block_borders_f9(model):
    """However much is fetched, the last token is computed."""
    lengths = [1, BLOCK_SIZE, BLOCK_SIZE + 1, 7 * BLOCK_SIZE - 1, 7 * BLOCK_SIZE, 7 * BLOCK_SIZE + 1]
    work = [(random_prompt(length, length), greedy(5)) for length in lengths]
    async with fleet(model, ("p0", "p1", "d0")) as workers:
        for (prompt, params), (tokens,) in zip(work, reference(model, work), strict=True):
            await workers.prefill("p0", workers.request(prompt, params))
            before = workers["p1"].value("computed_prompt_tokens_total")
            assert await workers.run("p1", "d0", prompt, params, [workers["p0"].source()]) == tokens
            held = min(len(prompt) // BLOCK_SIZE * BLOCK_SIZE, len(prompt) - 1)
            assert workers["p1"].value("computed_prompt_tokens_total") - before == len(prompt) - held


async def test_a_migrated_request_fetches_its_outputs_too(model):
    """As after the loss of its worker: output that is a fact travels as input, and its KV comes from a third one."""
    ((tokens,),) = reference(model, [(PROMPT, greedy(20))])
    async with fleet(model, ("d0", "d1")) as workers:
        assert await workers.decode("d0", workers.request(PROMPT, greedy(20))) == tokens
        request = workers.request(PROMPT, greedy(20), [workers["d0"].source()])
        request.choices.append(types_pb2.ChoiceState(choice=0, output_token_ids=tokens[:15]))
        assert await workers.decode("d1", request) == tokens[15:]
        held = (len(PROMPT) + 15 - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert workers["d1"].value("fetched_tokens_total", source="remote_decode") == held


async def test_a_prompt_whose_logprobs_are_wanted_is_computed_whatever_others_hold(model, expected):
    """What is fetched could not be used: the log-probabilities come from computing."""
    params = greedy(6, prompt_logprobs=1)
    async with fleet(model, ("p0", "p1", "d0")) as workers:
        await warm(workers, "p0")
        hint = [workers["p0"].source()]
        (first,) = (await workers.prefill("p1", workers.request(PROMPT, params, hint))).tokens
        assert first.token_id == expected[0]
        assert await workers.decode("d0", workers.request(PROMPT, params, hint)) == expected
        for name in ("p1", "d0"):
            assert len(workers[name].worker.peers) == 0, "nobody was asked"
            assert workers[name].value("computed_prompt_tokens_total") == len(PROMPT)
        request = workers.request(PROMPT, params, hint)
        request.choices.append(types_pb2.ChoiceState(choice=0, output_token_ids=expected[:2]))
        assert await workers.decode("d0", request) == expected[2:]
        assert len(workers["d0"].worker.peers) == 0, "d0 has it itself by now"
