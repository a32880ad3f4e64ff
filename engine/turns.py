"""Processes that share cores take turns, a step each: apart, every step has all cores; together, threads that don't run
hold up the barriers of those that do, in every op of both.

Measured in docs/decisions/0007: a third more tokens of 1P1D on 2 cores.
"""

import fcntl
import os
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

VARIABLE = "PAGEWIRE_CPU_TURNS"
"""Names the directory of the locks; `pagewire up` sets it where each of its workers uses all cores."""
MOST_SECONDS = 2.0
REST_SECONDS = 30.0
_LOOK_SECONDS = 0.05
"""Between two looks at a lock whose bell does not ring: its process may have died."""


class Turns:
    """`with turns.one():` around a step. Who waits for the turn holds the door, so that two that want it alternate.

        A   turn ────────┐door…      ┌turn ───
        B   door.........└turn ──────┘door…

    A turn is a courtesy: the other may be frozen. Who has waited `MOST_SECONDS` goes on without, and waits no more
    before it has had one or `REST_SECONDS` are over: a busy other never leaves the turn free by itself. A lock ends
    with the process that has it.
    """

    def __init__(self, directory: Path) -> None:
        with ExitStack() as opened:
            self._door, self._turn = (opened.enter_context(_Lock(directory, name)) for name in ("door", "turn"))
            self._closing = opened.pop_all()
        self._waits_from = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Waits for its turn, and gives it up at the end."""
        now = time.monotonic()
        deadline = now
        if now >= self._waits_from:
            deadline, self._waits_from = now + MOST_SECONDS, now + MOST_SECONDS + REST_SECONDS
        with ExitStack() as stack:
            if self._door.take(deadline):
                if self._turn.take(deadline):
                    self._waits_from = 0.0
                    stack.callback(self._turn.give_up)
                self._door.give_up()
            yield

    def close(self) -> None:
        self._closing.close()


class _Lock:
    """A file's lock and a pipe that rings when it is given up: who waits sleeps, since each look at the lock would take
    a core from those that work."""

    def __init__(self, directory: Path, name: str) -> None:
        with ExitStack() as opened:
            self._file = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, self._file)
            bell = directory / f"{name}.bell"
            with suppress(FileExistsError):
                os.mkfifo(bell, 0o600)
            self._bell = os.open(bell, os.O_RDWR | os.O_NONBLOCK)
            opened.callback(os.close, self._bell)
            self._closing = opened.pop_all()
        self._rung = select.poll()
        self._rung.register(self._bell, select.POLLIN)

    def __enter__(self) -> "_Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def take(self, deadline: float) -> bool:
        """False if it is not to be had by then."""
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if (seconds := deadline - time.monotonic()) <= 0:
                    return False
            if self._rung.poll(1e3 * min(seconds, _LOOK_SECONDS)):
                with suppress(BlockingIOError):  # another one has heard it
                    os.read(self._bell, 4096)

    def give_up(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        with suppress(BlockingIOError):  # it rings already
            os.write(self._bell, b".")


def turns_of_environment() -> Turns | None:
    """Those that `VARIABLE` names, if it does. Raises ValueError."""
    directory = os.environ.get(VARIABLE)
    try:
        return Turns(Path(directory)) if directory else None
    except OSError as error:
        raise ValueError(f"{VARIABLE} = {directory!r}: {error.strerror}") from None
