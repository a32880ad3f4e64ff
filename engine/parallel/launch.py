"""Starting the processes of ranks: as children on this machine, or as actors of a Ray cluster."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from engine.parallel.rank import INHERITED


class RankProcess(Protocol):
    """One that was started."""

    def how_it_ended(self, timeout: float) -> str | None:
        """ "exit code 1", "signal SIGKILL"; None if it still runs after so many seconds."""
        ...

    def kill(self) -> None:
        """Returns when it is gone; fine if it is already."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank that can be talked to. `connection` has a process at its other end that was started here, of this user."""

    rank: int
    pid: int
    connection: socket.socket


class Launcher(Protocol):
    """Starts ranks, which then arrive in any order."""

    @property
    def host(self) -> str:
        """This machine's address for ranks on others."""
        ...

    def machine(self, rank: int) -> str:
        """The name of the machine where the rank runs, or will; "" if it is this one."""
        ...

    def start(self, rank: int) -> RankProcess: ...
    def accept(self, timeout: float) -> Arrival | None:
        """The next one that has arrived; None if none does within about so many seconds. The caller closes it."""
        ...

    def close(self) -> None:
        """Ends what it keeps running beside the ranks, after them."""
        ...


class ChildProcess:
    """`python -m engine.parallel.rank`, in a session of its own: signals of a terminal are for rank 0 alone."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        """The process inherits `connection`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.parallel.rank"],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a worker's stdout has its ready line and nothing else
            env={**os.environ, INHERITED: f"{connection.fileno()}:{rank}"},
            pass_fds=[connection.fileno()],
            start_new_session=True,
        )
        self.pid = self._process.pid

    def how_it_ended(self, timeout: float) -> str | None:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout)
            return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class ChildProcesses:
    """The launcher `mp`. Nobody else can reach the sockets: they have no names."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []

    def machine(self, rank: int) -> str:
        return ""

    def start(self, rank: int) -> ChildProcess:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with other:
                process = ChildProcess(rank, other)
        except BaseException:
            own.close()
            raise
        self._arrivals.append(Arrival(rank, process.pid, own))
        return process

    def accept(self, timeout: float) -> Arrival | None:
        return self._arrivals.pop(0) if self._arrivals else None

    def close(self) -> None:
        for arrival in self._arrivals:  # not taken any more
            arrival.connection.close()
        self._arrivals = []
