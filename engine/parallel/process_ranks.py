"""Ranks that are processes, connected by one of torch.distributed's backends."""

import ctypes
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from engine.parallel.group import STEP_SECONDS

LOOPBACK = "127.0.0.1"
_PATIENCE = timedelta(seconds=STEP_SECONDS)
_LOOK = timedelta(seconds=0.5)

dist: Any = torch.distributed
"""Untyped: its types lack half of what is used here."""


class ProcessRanks:
    """Ranks that are processes, connected by one of torch.distributed's backends. It has no global state there.

    The first thing ranks do is to find each other through the store.
    """

    def __init__(self, store: Any, rank: int, size: int, host: str = LOOPBACK) -> None:
        """`host`: this machine's address for the others."""
        self.rank = rank
        self.size = size
        self._is_given_up = False
        self._group = _gloo(store, rank, size, host)
        self.sum(torch.zeros(1))  # until then others may still read the store, which goes next

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
        self._wait(self._group.allgather([list(parts.unbind())], [x]))
        return parts

    def gather(self, x: Tensor) -> Tensor | None:
        x = x.contiguous()
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device) if self.rank == 0 else None
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([] if parts is None else [list(parts.unbind())], [x], options))
        return parts

    def give_up(self) -> None:
        """Ends what this process waits for, within half a second. From any thread. It is the end of the group."""
        self._is_given_up = True

    def _wait(self, work: Any) -> None:
        """Raises RuntimeError: gloo's, or after `give_up`."""
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if self._is_given_up:
                # Gloo's own thread goes on waiting, and the group's destructor would wait for it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                raise RuntimeError("the ranks' group was given up")


def file_store(file: Path, size: int) -> Any:
    """Of ranks on one machine, which all can write `file`."""
    return dist.FileStore(str(file), size)


def serve_store(host: str, size: int) -> tuple[Any, int]:
    """A store that listens at `host` and nowhere else, and its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()
    store = dist.TCPStore(
        host, port, size, is_master=True, timeout=_PATIENCE, wait_for_workers=False, master_listen_fd=fd
    )
    return store, port


def reach_store(host: str, port: int, size: int) -> Any:
    """What `serve_store` serves."""
    return dist.TCPStore(host, port, size, is_master=False, timeout=_PATIENCE)


def _gloo(store: Any, rank: int, size: int, host: str) -> Any:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = _PATIENCE
    return gloo(store, rank, size, options)
