"""Ranks that are forked from the zygote: each is saved the 2 s of CPU of its imports."""

import signal
from contextlib import suppress
from pathlib import Path

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

    def __init__(self, zygote: Zygote, log: Path) -> None:
        self._zygote = zygote
        self._log = log

    def start(self, rank: int, address: str, token: bytes) -> ForkedRank:
        where = f"{address}:{token.hex()}:{rank}"
        return ForkedRank(self._zygote.start_rank(where, self._log.with_suffix(".out"), self._log))

    def close(self) -> None:
        """The zygote lives on."""
