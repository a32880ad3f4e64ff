"""An engine in a process of its own that measures on command, and is stopped while the other one measures."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peers.points import POINT, READY


class EngineFailed(Exception):
    """It ended; the message has its log's tail."""


class EngineProcess:
    """Use as a context manager. Between measurements the whole process group is stopped (SIGSTOP): it costs nothing."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.seconds_to_start = 0.0
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Loaded, warmed up, then stopped."""
        self.seconds_to_start = self._answer(READY)
        self._signal(signal.SIGSTOP)

    def measure(self, point: str) -> float:
        """A point's value, by `Points.measure`."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(point + "\n")
            self._process.stdin.flush()
            return self._answer(POINT)
        finally:
            self._signal(signal.SIGSTOP)

    def _answer(self, kind: str) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, value = line.strip().partition(" ")
            if word == kind:
                return float(value)
        tail = self._log.read_text(errors="replace")[-2000:]
        raise EngineFailed(f"{self.name} ended with code {self._process.wait()}:\n{tail}")

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
