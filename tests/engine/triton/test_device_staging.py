"""Lanes: bytes out of the pool and into it, one step behind what was launched, bounded, none lost."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from engine import device_staging
from engine.device_staging import NUM_LANES, rows_per_lane, staging_bytes
from engine.device_streams import HostStreams
from engine.memory import KvLayout, KvMemory

LAYOUT = KvLayout(2, 2, 8, 4, torch.bfloat16)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> KvMemory:
    monkeypatch.setattr(device_staging, "LANE_BYTES", 3 * LAYOUT.block_bytes + 1)
    return KvMemory(LAYOUT, 7, staged=True)


def pool_bytes(memory: KvMemory) -> np.ndarray:
    return memory.blocks.view(7, -1).view(torch.uint8).numpy()


def test_rows_are_the_blocks(memory: KvMemory) -> None:
    assert len(memory.buffer) == 0
    assert (memory.io.most, memory.io.block_bytes) == (3, LAYOUT.block_bytes)
    random = np.random.default_rng(1).integers(0, 256, (7, LAYOUT.block_bytes), np.uint8)
    pool_bytes(memory)[:] = random
    with memory.io.reading([5, 0, 2]) as rows:
        assert (np.stack(rows) == random[[5, 0, 2]]).all()
    new = 255 - random[:2]
    with memory.io.writing([6, 1]) as rows:
        for row, source in zip(rows, new, strict=True):
            row[:] = source
    with memory.io.writing_part(4, 16, 24) as part:
        part[:] = 9
    expected = random.copy()
    expected[[6, 1]] = new
    expected[4, 16:40] = 9
    assert (pool_bytes(memory) == expected).all()
    with pytest.raises(ValueError, match="4 blocks at once, at most 3"), memory.io.reading([0, 1, 2, 3]):
        pass
    assert not memory.num_busy_lanes
    memory.close()


def test_what_was_given_up_does_not_reach_the_pool(memory: KvMemory) -> None:
    def write(writing: AbstractContextManager[Any]) -> None:
        with writing as rows:
            rows[0] = 3
            raise OSError("broken")

    for writing in (memory.io.writing([1]), memory.io.writing_part(1, 0, 8)):
        with pytest.raises(OSError, match="broken"):
            write(writing)
    assert not pool_bytes(memory).any()
    assert not memory.num_busy_lanes
    memory.close()


def test_lanes_are_bounded_and_all_come_back(memory: KvMemory) -> None:
    """More threads than lanes: the others wait, and every byte is right."""
    go_on, inside = threading.Event(), threading.Semaphore(0)

    def write(block_id: int) -> None:
        with memory.io.writing([block_id % 7]) as rows:
            rows[0][:] = block_id % 7
            inside.release()
            assert go_on.wait(30)

    with ThreadPoolExecutor(NUM_LANES + 3) as threads:
        running = [threads.submit(write, number) for number in range(NUM_LANES + 3)]
        for _ in range(NUM_LANES):
            assert inside.acquire(timeout=30)
        assert not inside.acquire(timeout=0.05)
        assert memory.num_busy_lanes == NUM_LANES
        with pytest.raises(AssertionError, match=f"{NUM_LANES} staging lanes are held"):
            memory.close()
        go_on.set()
        for each in running:
            each.result(30)
    assert (pool_bytes(memory) == np.arange(7)[:, None]).all()
    memory.close()


def test_a_copy_that_fails_gives_its_lane_back(memory: KvMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(HostStreams, "run", fail)
    with pytest.raises(RuntimeError, match="the device is gone"), memory.io.reading([1]):
        pass
    memory.close()


@pytest.mark.parametrize("way", ["reading", "writing"])
def test_nothing_comes_out_of_pageable_memory(memory: KvMemory, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A thread that copies out of it spins until the stream has got there: for a whole step."""

    def run(self: HostStreams, number: int, launch: Callable[[], None]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", None)
            launch()

    monkeypatch.setattr(HostStreams, "run", run)
    with getattr(memory.io, way)([1, 3]) as rows:
        assert len(rows) == 2
    memory.close()


def test_a_lane_holds_at_least_one_block() -> None:
    assert rows_per_lane(2 << 20) == 4
    assert rows_per_lane(20 << 20) == 1
    assert staging_bytes(2 << 20) == 64 << 20
    assert staging_bytes(20 << 20) == NUM_LANES * (20 << 20)
