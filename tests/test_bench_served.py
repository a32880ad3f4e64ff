"""Served systems beside each other: their load, and a peer that can't start says why, at once."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from bench.served.loads import Interference, interfere
from bench.served.points import POINTS, points
from bench.served.systems import SystemFailed
from bench.served.vllm_pd import vllm_pd
from pagewire.benchmark.backend import Delta, Served
from pagewire.benchmark.datasets import Sample


class _Slow:
    """Long prompts get their tokens only `late` seconds after the plan's end, everybody else at once."""

    def __init__(self, plan: Interference, late: float) -> None:
        self.num_longs = 0
        self._is_long = plan.long[0]
        self._answers_at = asyncio.get_running_loop().time() + plan.lead + plan.seconds + late

    async def open(self) -> Served:
        return Served("slow", None)

    async def stream(self, sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        assert isinstance(sample.prompt, tuple)
        if len(sample.prompt) == self._is_long:
            self.num_longs += 1
            await asyncio.sleep(self._answers_at - asyncio.get_running_loop().time())
        for _ in range(sample.output_len):
            await asyncio.sleep(0.001)
            yield Delta(True, "x")

    async def close(self) -> None:
        pass


async def test_a_load_that_is_too_much_shows_in_the_backlog() -> None:
    plan = Interference(1, (1, 4), (9, 2), (2, 2), every=0.1, num_longs=2)
    system = _Slow(plan, late=0.2)
    found = await interfere(system, plan)
    assert system.num_longs == 2
    assert found["backlog_ms"] >= 200
    assert found["itl_p50_ms"] >= 1


def test_the_goals_load_is_that_of_every_eight_seconds() -> None:
    plan = Interference()
    assert (plan.every, plan.short_every, plan.lead, plan.seconds) == (8.0, 2.0, 4.0, 24.0)


def test_there_is_every_point() -> None:
    assert tuple(points(Interference())) == POINTS


async def test_a_peer_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "environment" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho Illegal instruction\nexit 132\n")
    program.chmod(0o700)
    with pytest.raises(SystemFailed, match=r"ended with code 132:\nIllegal instruction"):
        async with vllm_pd(tmp_path / "environment", tmp_path, tmp_path):
            pass
