"""Starting the processes of ranks: as children on this machine, or as actors of a Ray cluster."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Protocol

from engine.parallel.rank import ADDRESS


class RankProcess(Protocol):
    """One that was started."""

    def how_it_ended(self, timeout: float) -> str | None:
        """ "exit code 1", "signal SIGKILL"; None if it still runs after so many seconds."""
        ...

    def kill(self) -> None:
        """Returns when it is gone; fine if it is already."""
        ...


class Launcher(Protocol):
    """Starts ranks, which connect to the abstract Unix socket `address` and show `token`."""

    def start(self, rank: int, address: str, token: bytes) -> RankProcess: ...
    def close(self) -> None:
        """Ends what it keeps running beside the ranks, after them."""
        ...


class ChildProcess:
    """`python -m engine.parallel.rank`, in a session of its own: signals of a terminal are for rank 0 alone."""

    def __init__(self, rank: int, address: str, token: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.parallel.rank"],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a worker's stdout has its ready line and nothing else
            env={**os.environ, ADDRESS: f"{address}:{token.hex()}:{rank}"},
            start_new_session=True,
        )

    def how_it_ended(self, timeout: float) -> str | None:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout)
            return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class ChildProcesses:
    """The launcher `mp`."""

    def start(self, rank: int, address: str, token: bytes) -> ChildProcess:
        return ChildProcess(rank, address, token)

    def close(self) -> None:
        """There is nothing else."""
