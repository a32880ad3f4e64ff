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
WORKING_SHARE = 0.1
"""Of a processor, at least, used by a process that is at work and not frozen."""
_PID_BYTES = 8
_LOOK_SECONDS = 0.05
"""Between two looks at a lock whose bell does not ring: its process may have died."""


class Turns:
    """`with turns.one():` around a step. Who waits for the turn holds the door, so that two that want it alternate.

        A   turn ────────┐door…      ┌turn ───
        B   door.........└turn ──────┘door…

    A turn is a courtesy: the other may be frozen. Who has waited `MOST_SECONDS` goes on without. Did the other one not
    even use a processor meanwhile, it waits no more before it has had a turn or `REST_SECONDS` are over. A lock ends
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
        has_turn = self._take(now) or (now >= self._waits_from and self._wait(now))
        try:
            if has_turn:
                self._waits_from = 0.0
            yield
        finally:
            if has_turn:
                self._turn.give_up()

    def _take(self, deadline: float) -> bool:
        if not self._door.take(deadline):
            return False
        try:
            return self._turn.take(deadline)
        finally:
            self._door.give_up()

    def _wait(self, now: float) -> bool:
        """False if it goes on without: beside one that is slow, or frozen."""
        before = {lock: lock.owner() for lock in (self._door, self._turn)}
        if self._take(now + MOST_SECONDS):
            return True
        held = self._turn if self._turn.is_taken() else self._door  # who stands there and does not take a free turn
        (owner, cpu_seconds), (owner_now, cpu_seconds_now) = before[held], held.owner()
        if owner_now == owner and cpu_seconds_now - cpu_seconds < WORKING_SHARE * MOST_SECONDS:
            self._waits_from = now + MOST_SECONDS + REST_SECONDS
        return False

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
                with suppress(OSError):  # no room for a name: who can't be told counts as frozen
                    os.pwrite(self._file, os.getpid().to_bytes(_PID_BYTES, "little"), 0)
                return True
            except BlockingIOError:
                if (seconds := deadline - time.monotonic()) <= 0:
                    return False
            if self._rung.poll(1e3 * min(seconds, _LOOK_SECONDS)):
                with suppress(BlockingIOError):  # another one has heard it
                    os.read(self._bell, 4096)

    def is_taken(self) -> bool:
        """By another: it is not for who has it."""
        if not self.take(0.0):
            return True
        self.give_up()
        return False

    def owner(self) -> tuple[int, float]:
        """The process that had it last, and the CPU time it has used."""
        pid = int.from_bytes(os.pread(self._file, _PID_BYTES, 0), "little")
        return pid, _cpu_seconds(pid)

    def give_up(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        with suppress(BlockingIOError):  # it rings already
            os.write(self._bell, b".")


def _cpu_seconds(pid: int) -> float:
    """Of all its threads; 0 if there is no such process to be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def turns_of_environment() -> Turns | None:
    """Those that `VARIABLE` names, if it does. Raises ValueError."""
    directory = os.environ.get(VARIABLE)
    try:
        return Turns(Path(directory)) if directory else None
    except OSError as error:
        raise ValueError(f"{VARIABLE} = {directory!r}: {error.strerror}") from None
