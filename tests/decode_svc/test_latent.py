"""Latent attention, disaggregated: the single process's tokens, and a transfer of latents alone."""

import pytest

from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import cluster, greedy, random_prompt, reference

LENGTHS = [1, 4, 5, 13, 33]
NIGHTLY = [pytest.param(plane, marks=pytest.mark.nightly) for plane in ("tcp", "shm_map", "shm_ring")]


@pytest.mark.parametrize("plane", ["grpc", "shm_vm", *NIGHTLY])
async def test_cold_and_warm(tiny_model, plane):
    model = tiny_model("deepseek_v2" if plane == "grpc" else "deepseek_v3")
    work = [(random_prompt(length, length), greedy(6)) for length in LENGTHS]
    work.append((random_prompt(23, 4), SamplingParams(n=2, temperature=1.0, max_tokens=6, ignore_eos=True, seed=11)))
    expected = reference(model, work)
    async with cluster(model, plane=plane) as workers:
        assert [await workers.run(*each) for each in work] == expected, "cold"
        assert await workers.run_all(work) == expected, "warm"
        assert workers.value(workers.decode, "pagewire:recomputed_tokens_total") == 0
        await workers.check_nothing_is_held()


async def test_a_token_travels_as_one_cell_in_each_layer(tiny_model):
    model = tiny_model("deepseek_v2")
    async with cluster(model) as workers:
        await workers.run(random_prompt(60, 60), greedy(4))
        num_bytes = workers.value(workers.decode, "pagewire:transfer_bytes_total")
        # Keys and values of 4 heads would be 4 * (24 + 20) numbers; a latent and its rotated key are 40 + 8.
        assert num_bytes == 60 * workers.decode_engine.config.num_layers * (40 + 8) * 4
