"""Many requests over workers that fail at random moments: whatever happens, the stream is whole and nothing is left."""

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from pagewire.errors import PagewireError
from router.request import FinishReason
from router.services import RetryLimits
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, ScriptedWorker
from tests.router.system import System, a_system, wanted

LIMITS = RetryLimits(max_prefills=3, max_migrations=40, avoid_seconds=0.05, wait_seconds=3.0, poll_seconds=0.01)


def trouble(rng: random.Random, worker: ScriptedWorker) -> None:
    """One fault, drawn at random; scripts go back to good by themselves or with the next draw."""
    script = worker.script
    if isinstance(worker, ScriptedPrefill):
        script.die_before_accept, script.die_after_accept, script.hang = rng.choice(
            [(True, False, False), (False, True, False), (False, False, False), (False, False, False)]
        )
        script.refuse = rng.choice([None, None, grpc.StatusCode.UNAVAILABLE])
    elif rng.random() < 0.5:
        script.break_after = rng.randrange(6)
    else:
        script.fail_after = rng.randrange(6)
    script.delay = rng.choice([0.0, 0.001, 0.01])


async def one_request(system: System, rng: random.Random) -> str:
    """Runs a request and checks it; some clients leave in the middle."""
    prompt = [rng.randrange(5, 200) for _ in range(rng.randrange(1, 12))]
    n, num_tokens = rng.choice([1, 1, 2, 3]), rng.randrange(1, 12)
    if rng.random() < 0.25:
        running = asyncio.create_task(system.generate(prompt=prompt, n=n, max_tokens=num_tokens))
        await asyncio.sleep(rng.random() * 0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return "left"
    result = await system.generate(prompt=prompt, n=n, max_tokens=num_tokens, logprobs=0)
    assert result.token_ids == {choice: wanted(num_tokens, prompt=prompt, choice=choice) for choice in range(n)}
    assert set(result.finish.values()) == {FinishReason.LENGTH}
    logprobs = {choice: [-1.0 - index for index in range(num_tokens)] for choice in range(n)}
    for piece in result.pieces:
        assert [item.logprob for item in piece.logprobs] == logprobs[piece.choice][piece.index :][
            : len(piece.token_ids)
        ]
    return "whole"


@pytest.mark.parametrize("seed", range(4))
async def test_streams_are_whole_whatever_fails(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    prefills = [ScriptedPrefill(f"p{number}", Script()) for number in range(2)]
    decodes = [ScriptedDecode(f"d{number}", Script()) for number in range(2)]
    workers: list[ScriptedWorker] = [*prefills, *decodes]
    async with a_system(tmp_path, prefills=prefills, decodes=decodes, retry_limits=LIMITS) as system:

        async def make_trouble() -> None:
            while True:
                await asyncio.sleep(0.01)
                worker = rng.choice(workers)
                if rng.random() < 0.15:
                    system.placer.lost.add(worker.worker_id)
                    await worker.kill()
                    await asyncio.sleep(0.03)
                    await worker.restart()
                    system.placer.lost.discard(worker.worker_id)
                else:
                    trouble(rng, worker)

        troubling = asyncio.create_task(make_trouble())
        try:
            ends: list[str] = []
            for _ in range(5):
                ends += await asyncio.gather(*(one_request(system, rng) for _ in range(6)))
        finally:
            troubling.cancel()
            await asyncio.gather(troubling, return_exceptions=True)
        assert ends.count("whole") >= 10
        for worker in workers:
            worker.script = Script()
            if worker._server is None:
                await worker.restart()
            system.placer.lost.discard(worker.worker_id)
        for _ in range(3):
            with_luck = await asyncio.gather(*(system.generate() for _ in range(4)), return_exceptions=True)
            failures = [end for end in with_luck if isinstance(end, PagewireError)]
            if not failures:
                break
            await asyncio.sleep(0.3)
        assert not failures, "everybody is well again"
