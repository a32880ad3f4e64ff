"""Models with sliding windows, disaggregated: the single process's tokens; of a window only what is in it travels."""

import asyncio

import pytest

from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import cluster, greedy, random_prompt, reference

LENGTHS = [1, 4, 5, 8, 12, 13, 20, 33]


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def model(tiny_model, request):
    """Windows of 19 in three layers of four, of 11 in all."""
    return tiny_model(request.param)


@pytest.mark.parametrize(
    "plane", ["grpc", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("tcp", "shm_vm", "shm_ring"))]
)
async def test_cold_and_warm(model, plane):
    work = [(random_prompt(length, length), greedy(6)) for length in LENGTHS]
    expected = reference(model, work)
    async with cluster(model, plane=plane) as workers:
        assert workers.decode_engine.kv_cache.groups.slides
        assert [await workers.run(*each) for each in work] == expected, "cold"
        assert [await workers.run(*each) for each in work] == expected, "warm"
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0
        await workers.check_nothing_is_held()


async def test_only_what_is_in_the_window_travels(tiny_model):
    model = tiny_model("gemma3")
    prompt = random_prompt(60, 60)
    expected = reference(model, [(prompt, greedy(4))])
    num_bytes = {}
    for is_off in (False, True):
        options = {"disable_hybrid_kv_cache_manager": is_off}
        async with cluster(model, prefill_options=options, decode_options=options) as workers:
            assert await workers.run_all([(prompt, greedy(4))]) == expected
            num_bytes[is_off] = workers.value(workers.decode, "pagewire:transfer_bytes_total")
    # 15 blocks; in three layers of four those of the last token's window: from 59 - 17 = 42, block 10, on
    assert num_bytes[False] / num_bytes[True] == (15 + 3 * 5) / (4 * 15)


async def test_choices_migration_and_known_tokens(model):
    """What goes on behind a ticket: forks, an output so far, and a first token that the router knows already."""
    prompt = random_prompt(23, 4)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True, seed=11)
    one = greedy(8)
    expected, ((line,),) = reference(model, [(prompt, params)])[0], reference(model, [(prompt, one)])
    async with cluster(model) as workers:
        assert await workers.run(prompt, params) == expected
        states = [{"choice": i, "output_token_ids": expected[i][: 2 * i]} for i in range(3)]
        request = workers.request(prompt, params, choices=states)
        await workers.prefill_all(request)
        outputs = await workers.decode_all(request, workers.ticket)
        assert outputs == [expected[i][2 * i :] for i in range(3)]
        for num_known in (1, 2, 5):
            await workers.prefill_all(workers.request(prompt, one))
            known = workers.request(prompt, one, choices=[{"choice": 0, "output_token_ids": line[:num_known]}])
            assert await workers.decode_all(known, workers.ticket) == [line[num_known:]]
        assert workers.value(workers.decode, "pagewire:recomputed_tokens_total") == 0


async def test_small_pools(model):
    """Prefills that run together take blocks on the way and get in each other's way; decode preempts."""
    work = [(random_prompt(40 + i, i), greedy(12)) for i in range(5)]
    expected = reference(model, work)
    small = {"num_blocks": 16, "max_model_len": 64, "max_num_batched_tokens": 8}
    async with cluster(model, prefill_options=small, decode_options=small) as workers:
        assert await asyncio.wait_for(workers.run_all(work), 120) == expected


async def test_workers_that_disagree_on_groups_do_not_exchange_kv(tiny_model):
    import grpc

    off = {"disable_hybrid_kv_cache_manager": True}
    async with cluster(tiny_model("gemma3"), decode_options=off) as workers:
        request = workers.request(random_prompt(9, 1), greedy(3))
        await workers.prefill_all(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await workers.decode_all(request, workers.ticket)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        workers.prefill.worker.release_ticket(workers.ticket)
