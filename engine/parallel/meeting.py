"""How the ranks find each other once all have loaded, as rank 0 sees it. A rank that dies meanwhile ends it."""

import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from engine.errors import EngineDied
from engine.parallel.group import RankGroup
from engine.parallel.shared_ranks import SharedRanks, can_share, make_memory


class Meeting(Protocol):
    """A context manager; what the others need is in `place` and `descriptors`."""

    @property
    def place(self) -> str:
        """Where they meet: a file, or tcp://host:port; "" if in the memory of the descriptor."""
        ...

    @property
    def descriptors(self) -> tuple[int, ...]: ...
    def group(self) -> RankGroup:
        """When all are there. Raises whatever keeps them apart, EngineDied after `give_up`."""
        ...

    def give_up(self) -> None:
        """Ends what waits for ranks that will not come, in the meeting or in a step. From any thread."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def meeting(backend: str, size: int, host: str | None = None) -> Meeting:
    """In shared memory where this process has started the ranks and has the native extension, else over gloo.

    `host`: this machine's address for ranks on others; None if there are none.
    """
    if host is None and backend == "mp" and can_share():
        return SharedMeeting(size)
    return GlooMeeting(size, host)


class SharedMeeting:
    """In the memory behind one descriptor."""

    place = ""

    def __init__(self, size: int) -> None:
        self._fd = make_memory(size)
        try:
            self._ranks = SharedRanks(self._fd, 0, size)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._fd,)

    def group(self) -> RankGroup:
        waiting = _Waiting(self._meet)
        try:
            return waiting.group()
        except BaseException:
            self._ranks.give_up()
            waiting.join()
            raise

    def _meet(self) -> "Endable":
        self._ranks.sum(torch.zeros(1))
        return self._ranks

    def give_up(self) -> None:
        self._ranks.give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)


class GlooMeeting:
    """At a file in a directory of its own, or with a `host` at a port there."""

    def __init__(self, size: int, host: str | None = None) -> None:
        from engine.parallel.process_ranks import LOOPBACK, file_store, serve_store  # it imports torch.distributed

        self._size = size
        self._host = host or LOOPBACK
        self._closing = ExitStack()
        if host is None:
            directory = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="pagewire-ranks-"))
            self.place = str(Path(directory) / "meeting")
            self._store = file_store(Path(self.place), size)
        else:
            self._store, port = serve_store(host, size)
            self.place = f"tcp://{host}:{port}"
        self.descriptors: tuple[int, ...] = ()
        self._waiting = _Waiting(self._meet)

    def group(self) -> RankGroup:
        return self._waiting.group()

    def _meet(self) -> "Endable":
        from engine.parallel.process_ranks import ProcessRanks

        return ProcessRanks(self._store, 0, self._size, self._host)

    def give_up(self) -> None:
        """In the meeting a thread still waits for gloo to do so itself."""
        self._waiting.give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._closing.close()


class Endable(RankGroup, Protocol):
    """A group whose waiting can be ended."""

    def give_up(self) -> None: ...


class _Waiting:
    """For what meets, in a thread of its own: so that it can be given up, and a signal interrupts who waits."""

    def __init__(self, meet: Callable[[], Endable]) -> None:
        self._meet = meet
        self._thread = threading.Thread(target=self._run, name="ranks-meeting", daemon=True)
        self._is_over = threading.Event()
        self._group: Endable | None = None
        self._error: Exception | None = None

    def group(self) -> RankGroup:
        self._thread.start()
        self._is_over.wait()
        if self._group is None:
            raise self._error or EngineDied("the ranks' meeting was given up")
        self.join()
        return self._group

    def join(self) -> None:
        """Until `meet` has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._group = self._meet()
        except Exception as error:
            self._error = error
        self._is_over.set()

    def give_up(self) -> None:
        """Ends the waiting, or what waits in the group that was found."""
        self._is_over.set()
        if self._group is not None:
            self._group.give_up()
