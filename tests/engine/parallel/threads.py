"""Ranks that are threads of the test."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
_SECONDS = 20.0


class ThreadRanks:
    """One rank's group; all of them have `parts` and `barrier` in common."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._parts = parts
        self._barrier = barrier

    def sum(self, x: Tensor) -> Tensor:
        parts = self.gather_all(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def gather(self, x: Tensor) -> Tensor | None:
        parts = self.gather_all(x)
        return parts if self._rank == 0 else None

    def gather_all(self, x: Tensor) -> Tensor:
        self._parts[self._rank] = x
        self._barrier.wait(_SECONDS)
        parts = torch.stack(self._parts)
        self._barrier.wait(_SECONDS)
        return parts


def on_ranks(size: int, work: Callable[[int, ThreadRanks], R]) -> list[R]:
    """What `work(rank, group)` gives on each rank."""
    parts = [torch.empty(0)] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(work, rank, ThreadRanks(rank, parts, barrier)) for rank in range(size)]
        return [each.result(_SECONDS) for each in running]
