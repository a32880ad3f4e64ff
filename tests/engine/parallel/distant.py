"""Ranks of this machine that rank 0 takes for those of another one."""

import socket

from engine.parallel.launch import Arrival, ChildProcess, ChildProcesses

NAME = "over there"


class DistantRanks(ChildProcesses):
    """A launcher in the place of `mp`: ranks from `first` on are reached over TCP and map nothing of rank 0's."""

    def __init__(self, first: int = 1) -> None:
        super().__init__()
        self._first = first

    def machine(self, rank: int) -> str:
        return NAME if rank >= self._first else ""

    def start(self, rank: int) -> ChildProcess:
        if rank < self._first:
            return super().start(rank)
        with socket.create_server((self.host, 0)) as listener:
            other = socket.create_connection(listener.getsockname())
            own, _ = listener.accept()
        with other:
            process = ChildProcess(rank, other)
        self._arrivals.append(Arrival(rank, process.pid, own))
        return process
