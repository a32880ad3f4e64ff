"""Processes that share cores take turns, a step each: apart, every step has all cores; together, threads that don't run
hold up the barriers of those that do, in every op of both.

Measured in docs/decisions/0007: a third more tokens of 1P1D on 2 cores.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

VARIABLE = "PAGEWIRE_CPU_TURNS"
"""Names the directory of the locks; `pagewire up` sets it where each of its workers uses all cores."""
MOST_SECONDS = 2.0
REST_SECONDS = 30.0
_POLL_SECONDS = 0.0003


class Turns:
    """`with turns.one():` around a step. Who waits for the turn holds the door, so that two that want it alternate.

        A   turn ────────┐door…      ┌turn ───
        B   door.........└turn ──────┘door…

    A turn is a courtesy: the other may be frozen. Who has waited `MOST_SECONDS` goes on without, and waits no more
    before it has had one or `REST_SECONDS` are over: a busy other never leaves the turn free by itself. A lock ends
    with the process that has it.
    """

    def __init__(self, directory: Path) -> None:
        self._files = [os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("door", "turn")]
        self._waits_from = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Waits for its turn, and gives it up at the end."""
        door, turn = self._files
        now = time.monotonic()
        deadline = now
        if now >= self._waits_from:
            deadline, self._waits_from = now + MOST_SECONDS, now + MOST_SECONDS + REST_SECONDS
        with ExitStack() as stack:
            if _lock(door, deadline):
                if _lock(turn, deadline):
                    self._waits_from = 0.0
                    stack.callback(fcntl.flock, turn, fcntl.LOCK_UN)
                fcntl.flock(door, fcntl.LOCK_UN)
            yield

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def turns_of_environment() -> Turns | None:
    """Those that `VARIABLE` names, if it does. Raises ValueError."""
    directory = os.environ.get(VARIABLE)
    try:
        return Turns(Path(directory)) if directory else None
    except OSError as error:
        raise ValueError(f"{VARIABLE} = {directory!r}: {error.strerror}") from None


def _lock(file: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
