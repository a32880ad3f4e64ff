"""Ranks that are processes, connected by one of torch.distributed's backends."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from engine.parallel.group import STEP_SECONDS

dist: Any = torch.distributed
"""Untyped: its types lack half of what is used here."""


class ProcessRanks:
    """Ranks that are processes, connected by one of torch.distributed's backends. It has no global state there.

    The first thing ranks do is to find each other through `meeting`, a file that all of them can write.
    """

    def __init__(self, meeting: Path, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = _gloo(dist.FileStore(str(meeting), size), rank, size)
        self.sum(torch.zeros(1))  # until then others may still read the file, which goes next

    def sum(self, x: Tensor) -> Tensor:
        parts = self.gather_all(x)
        # Not allreduce: its order of additions depends on how it cuts the tensor, so on the batch.
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._group.allgather([list(parts.unbind())], [x]).wait()
        return parts

    def gather(self, x: Tensor) -> Tensor | None:
        x = x.contiguous()
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device) if self.rank == 0 else None
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([] if parts is None else [list(parts.unbind())], [x], options).wait()
        return parts


def _gloo(store: Any, rank: int, size: int) -> Any:
    """Over the loopback interface: ranks are on one machine."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    return gloo(store, rank, size, options)
