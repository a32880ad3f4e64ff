"""Models with sliding windows, disaggregated: the single process's tokens, and of a window only what is in it travels."""

import asyncio

import pytest

from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import BLOCK_SIZE, cluster, greedy, random_prompt, reference

LENGTHS = [1, 4, 5, 8, 12, 13, 20, 33]


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def model(tiny_model, request):
    """Windows of 19 in three layers of four, of 11 in all."""
    return tiny_model(request.param)


@pytest.mark.parametrize("plane", ["grpc", "shm_vm", "shm_ring"])
async def test_cold_and_warm(model, plane):
    work = [(random_prompt(length, length), greedy(6)) for length in LENGTHS]
    expected = reference(model, work)
    async with cluster(model, plane=plane) as workers:
        assert workers.decode_engine.kv_cache.groups.slides
        assert [await workers.run(*each) for each in work] == expected, "cold"
        assert [await workers.run(*each) for each in work] == expected, "warm"
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0
        await workers.check_nothing_is_held()
