"""Disaggregated output is the single process's, token for token: every plane, length, chunk size, hit, sampling."""

import asyncio

import pytest

from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import BLOCK_SIZE, NIXL, NUM_BLOCKS, cluster, greedy, random_prompt, reference

PLANES = ["grpc", "tcp", "shm_vm", "shm_map", "shm_ring", NIXL]
LENGTHS = [1, 3, 4, 5, 7, 8, 9, 12, 16, 17]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.mark.parametrize("plane", PLANES)
async def test_every_plane_cold_and_warm(model, plane):
    work = [(random_prompt(length, length), greedy(5)) for length in LENGTHS]
    expected = reference(model, work)
    async with cluster(model, plane=plane) as workers:
        assert [await workers.run(*each) for each in work] == expected, "cold"
        assert [await workers.run(*each) for each in work] == expected, "warm"
        peers = workers.decode.worker.peers.connected()
        assert [peer.plane.name.lower() for peer in peers] == [plane]
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") > 0


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 64])
async def test_chunks_and_mixed_batches(model, chunk):
    work = [(random_prompt(length, 50 + length), greedy(4)) for length in (2, 33, 8, 17)]
    expected = reference(model, work)
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 4)}
    async with cluster(model, prefill_options=options) as workers:
        assert await workers.run_all(work) == expected


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
async def test_speculation_changes_no_token(model, method):
    """CASES F8: drafts on decode, none on prefill; sampled, with several choices, mixed batches.

    The draft model reads by itself what was transferred; it is the model itself, so all of its drafts come true.
    """
    few = {40: 30.0, 50: 30.0}  # repetitive text
    work = [
        (random_prompt(9, 60), greedy(40, logit_bias=few)),
        (2 * random_prompt(7, 61), greedy(30)),
        (random_prompt(5, 62), SamplingParams(n=2, temperature=0.4, seed=4, max_tokens=30, logit_bias=few)),
    ]
    expected = reference(model, work)
    config: dict[str, object] = {"prompt_lookup_min": 1} if method == "ngram" else {"model": str(model)}
    # Drafts whatever they cost, which depends on the machine.
    config |= {"num_speculative_tokens": 3, "least_acceptance": 0.0}
    options = {"speculative_config": config, "num_blocks": 2 * NUM_BLOCKS}
    async with cluster(model, decode_options=options) as workers:
        assert await workers.run_all(work) == expected
        drafted = workers.value(workers.decode, "vllm:spec_decode_num_draft_tokens_total")
        accepted = workers.value(workers.decode, "vllm:spec_decode_num_accepted_tokens_total")
        assert drafted > accepted > 10 if method == "ngram" else drafted == accepted > 60
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") > 0


async def test_block_size_16(model):
    work = [(random_prompt(length, length), greedy(4)) for length in (15, 16, 17, 48)]
    expected = reference(model, work, block_size=16)
    options = {"block_size": 16}
    async with cluster(model, prefill_options=options, decode_options=options) as workers:
        assert await workers.run_all(work) == expected


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm_vm", NIXL])
async def test_decode_keeps_what_it_has(model, plane):
    prompt = random_prompt(6 * BLOCK_SIZE + 1, 7)
    work = [(prompt[: 3 * BLOCK_SIZE], greedy(1)), (prompt, greedy(6))]
    expected = reference(model, work)
    async with cluster(model, plane=plane) as workers:
        assert await workers.decode_all(workers.request(*work[0]), None) == expected[0]
        own = workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total")
        assert own == 3 * BLOCK_SIZE
        assert await workers.run(*work[1]) == expected[1]
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") == 4
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == own


async def test_a_prompt_that_decode_has_whole(model):
    prompt = random_prompt(4 * BLOCK_SIZE, 8)
    work = [(prompt, greedy(5))]
    expected = reference(model, work)[0]
    async with cluster(model) as workers:
        assert await workers.run(*work[0]) == expected
        blocks = workers.value(workers.decode, "pagewire:transfer_blocks_total")
        assert await workers.run(*work[0]) == expected
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") == blocks, "nothing was pulled"
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0


async def test_several_choices_and_seeds(model):
    def sampled(n: int, seed: int) -> SamplingParams:
        return SamplingParams(n=n, temperature=1.0, max_tokens=6, ignore_eos=True, seed=seed, logprobs=2)

    work = [(random_prompt(length, length), sampled(n, seed)) for length, n, seed in ((9, 2, 5), (8, 3, 5), (6, 1, 9))]
    expected = reference(model, work)
    assert len({tuple(choice) for choice in expected[1]}) == 3
    async with cluster(model) as workers:
        assert await workers.run_all(work) == expected
        assert await asyncio.gather(*(workers.decode_all(workers.request(*each), None) for each in work)) == expected


async def test_finished_with_the_first_token(model):
    (eos, *_) = reference(model, [(random_prompt(9, 1), greedy(1))])[0][0]
    stops = SamplingParams(temperature=0.0, max_tokens=8, seed=1, stop_token_ids=(eos,))
    async with cluster(model) as workers:
        request = workers.request(random_prompt(9, 1), stops)
        first = await workers.prefill_all(request)
        assert [(token.token_id, token.finish_reason) for token in first.tokens] == [(eos, 1)]
        assert workers.prefill_engine.kv_cache.num_referenced == 0, "nobody needs the blocks"
        assert await workers.decode_all(request, workers.ticket) == [[]]


async def test_no_hand_off_leaves_no_ticket(model):
    work = (random_prompt(9, 1), greedy(1))
    expected = reference(model, [work])[0]
    async with cluster(model) as workers:
        first = await workers.prefill_all(workers.request(*work), hand_off=False)
        assert [[token.token_id] for token in first.tokens] == expected
        assert workers.ticket == b""
        assert len(workers.prefill.worker.leases) == 0
        assert workers.prefill_engine.kv_cache.num_referenced == 0


async def test_router_may_know_the_first_token_already(model):
    """A retry on another decode worker: the facts so far travel as input, the ticket covers the prompt."""
    prompt, params = random_prompt(11, 3), greedy(6)
    ((expected,),) = reference(model, [(prompt, params)])
    async with cluster(model) as workers:
        request = workers.request(prompt, params)
        await workers.prefill_all(request)
        state = {"choice": 0, "output_token_ids": expected[:2]}
        known = workers.request(prompt, params, choices=[state])
        assert await workers.decode_all(known, workers.ticket) == [expected[2:]]


async def test_migration_is_prefilled_with_the_output_so_far(model):
    prompt, params = random_prompt(11, 3), greedy(8)
    ((expected,),) = reference(model, [(prompt, params)])
    async with cluster(model) as workers:
        state = {"choice": 0, "output_token_ids": expected[:3]}
        request = workers.request(prompt, params, choices=[state])
        first = await workers.prefill_all(request)
        assert [(token.index, token.token_id) for token in first.tokens] == [(3, expected[3])]
        assert await workers.decode_all(request, workers.ticket) == [expected[4:]]
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0


async def test_one_choice_ends_with_its_first_token_the_other_goes_on(model):
    prompt = random_prompt(9, 4)
    free = SamplingParams(n=2, temperature=1.0, max_tokens=6, ignore_eos=True, seed=11)
    (outputs,) = reference(model, [(prompt, free)])
    assert outputs[0][0] != outputs[1][0]
    stopped = SamplingParams(n=2, temperature=1.0, max_tokens=6, seed=11, stop_token_ids=(outputs[0][0],))
    (expected,) = reference(model, [(prompt, stopped)])
    assert len(expected[0]) == 1 < len(expected[1])
    async with cluster(model) as workers:
        assert await workers.run(prompt, stopped) == expected


async def test_migration_of_several_choices(model):
    prompt = random_prompt(10, 4)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True, seed=11)
    (expected,) = reference(model, [(prompt, params)])
    states = [
        {"choice": 0, "output_token_ids": expected[0][:2]},
        {"choice": 1, "output_token_ids": expected[1][:4]},
        {"choice": 2, "output_token_ids": expected[2], "finished": True},
    ]
    async with cluster(model) as workers:
        for with_source in (True, False):
            request = workers.request(prompt, params, choices=states)
            if with_source:
                assert not (await workers.prefill_all(request)).tokens
            outputs = await workers.decode_all(request, workers.ticket if with_source else None)
            assert outputs == [expected[0][2:], expected[1][4:], []]


@pytest.mark.parametrize("length", [2, 4, 8, 10])
async def test_migration_when_one_of_two_choices_has_no_output_yet(model, length):
    prompt = random_prompt(length, length)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=6, ignore_eos=True, seed=12)
    (expected,) = reference(model, [(prompt, params)])
    states = [{"choice": 0, "output_token_ids": expected[0][:2]}, {"choice": 1}]
    async with cluster(model) as workers:
        request = workers.request(prompt, params, choices=states)
        first = (await workers.prefill_all(request)).tokens
        outputs = await workers.decode_all(request, workers.ticket)
        assert not first
        assert outputs == [expected[0][2:], expected[1]]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
async def test_every_family(tiny_model, family):
    work = [(random_prompt(length, length), greedy(5)) for length in (1, 4, 7, 16, 33)]
    expected = reference(tiny_model(family), work)
    async with cluster(tiny_model(family)) as workers:
        assert await workers.run_all(work) == expected, "cold"
        assert await workers.run_all(work) == expected, "warm"
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0
