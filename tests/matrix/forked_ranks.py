"""Ranks that are forked from the zygote: each is saved the 2 s of CPU of its imports."""

import signal
from contextlib import suppress
from pathlib import Path

from engine.parallel.launch import Arrival
from engine.parallel.named_socket import RankListener
from tests.chaos.zygote import Child, Zygote


class ForkedRank:
    """A rank forked from the zygote, as a RankProcess."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def how_it_ended(self, timeout: float) -> str | None:
        with suppress(TimeoutError):
            code = self._child.wait(timeout)
            return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return None

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class ForkedRanks:
    """A launcher in the place of `mp`."""

    host = "127.0.0.1"

    def __init__(self, zygote: Zygote, log: Path) -> None:
        self._zygote = zygote
        self._log = log
        self._listener = RankListener()

    def machine(self, rank: int) -> str:
        return ""

    def start(self, rank: int) -> ForkedRank:
        address, token = self._listener.address, self._listener.token
        return ForkedRank(self._zygote.start_rank(rank, address, token, self._log.with_suffix(".out"), self._log))

    def accept(self, timeout: float) -> Arrival | None:
        return self._listener.accept(timeout)

    def close(self) -> None:
        """The zygote lives on."""
        self._listener.close()
