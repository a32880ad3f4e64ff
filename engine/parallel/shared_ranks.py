"""Ranks of one machine that exchange what they compute in memory that all of them map (kernels/cpu/src/exchange.h)."""

import os
from typing import Any

import torch
from torch import Tensor

from engine.parallel.group import STEP_SECONDS
from kernels import cpu

CAPACITY = 1 << 20
"""Bytes that a rank says at a time; more goes piece by piece. Sums are the same, whatever it is."""
SPIN_SECONDS = 30e-6
"""To wait awake for another rank, where there are as many CPUs as ranks; then asleep."""


def can_share() -> bool:
    """Whether the native extension is here and knows exchanges; one that was built before does not."""
    return cpu.available() and hasattr(cpu.load().module, "Exchange")


def make_memory(size: int) -> int:
    """A descriptor of the memory for `size` ranks, which the caller closes."""
    fd = os.memfd_create("pagewire-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _exchange().bytes(size, CAPACITY))
    except BaseException:
        os.close(fd)
        raise
    return fd


class SharedRanks:
    """A RankGroup. Who waits raises RuntimeError after `give_up`, or when a rank is silent for `timeout` seconds."""

    def __init__(self, fd: int, rank: int, size: int, timeout: float = STEP_SECONDS) -> None:
        """Maps the memory of `make_memory`; `fd` may be closed then."""
        self.rank = rank
        self.size = size
        num_bytes = _exchange().bytes(size, CAPACITY)
        # Keeps it mapped, and no descriptor of it open, as Python's own mapping would.
        self._memory = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
        spin = SPIN_SECONDS if len(os.sched_getaffinity(0)) >= size else 0.0
        self._exchange = _exchange()(self._memory.data_ptr(), CAPACITY, rank, size, int(spin * 1e9), int(timeout * 1e3))

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.dtype != torch.float32:
            raise ValueError(f"ranks add float32, not {x.dtype}")
        total = torch.empty_like(x)
        self._exchange.sum(x.data_ptr(), total.data_ptr(), x.numel())
        return total

    def gather(self, x: Tensor) -> Tensor | None:
        if self.rank == 0:
            return self.gather_all(x)
        x = x.contiguous()
        self._exchange.gather(x.data_ptr(), 0, x.nbytes)
        return None

    def gather_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype)
        self._exchange.gather(x.data_ptr(), parts.data_ptr(), x.nbytes)
        return parts

    def give_up(self) -> None:
        """Ends what this process waits for, now and later. From any thread."""
        self._exchange.give_up()


def _exchange() -> Any:
    return cpu.load().module.Exchange
