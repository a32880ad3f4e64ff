"""Many requests at once through small pools, some cancelled at random moments: right tokens, nothing left."""

import asyncio
import random

import pytest

from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import NIXL, cluster, random_prompt, reference


def workload(random_numbers: random.Random) -> list[tuple[list[int], SamplingParams]]:
    shared = random_prompt(12, 99)
    work = []
    for number in range(24):
        prompt = random_prompt(random_numbers.randint(1, 30), number)
        if number % 3 == 0:
            prompt = shared + prompt
        n = 2 if number % 5 == 0 else 1
        work.append(
            (prompt, SamplingParams(n=n, temperature=float(number % 2), seed=number, max_tokens=8, ignore_eos=True))
        )
    return work


# NIXL is installed by `make nightly` alone.
LATER = [pytest.param(plane, marks=pytest.mark.nightly) for plane in ("tcp", "shm_ring")]


@pytest.mark.parametrize("plane", ["grpc", "shm_vm", *LATER, NIXL])
async def test_random_load_and_cancels(tiny_model, plane):
    model = tiny_model("llama")
    random_numbers = random.Random(plane)
    work = workload(random_numbers)
    expected = reference(model, work)
    small = {"num_blocks": 28, "max_num_batched_tokens": 12, "max_num_seqs": 6}
    async with cluster(model, plane=plane, prefill_options=small, decode_options=small) as workers:

        async def run(number: int, cancel_after: float | None) -> None:
            await asyncio.sleep(random_numbers.random() * 0.5)
            running = asyncio.create_task(workers.run(*work[number]))
            if cancel_after is None:
                assert await running == expected[number]
                return
            await asyncio.sleep(cancel_after)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        delays = [random_numbers.random() * 0.6 if number % 3 == 1 else None for number in range(len(work))]
        async with asyncio.timeout(200):
            await asyncio.gather(*(run(number, delay) for number, delay in enumerate(delays)))
        for ticket in workers.prefill.worker.leases.tickets:
            workers.prefill.worker.release_ticket(ticket.name)  # of cancelled requests, as a router does
