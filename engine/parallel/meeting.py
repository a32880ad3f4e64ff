"""How the ranks find each other once all have loaded, as rank 0 sees it. A rank that dies meanwhile ends it."""

import os
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from engine.errors import EngineDied
from engine.parallel.group import RankGroup
from engine.parallel.shared_ranks import SharedRanks, can_share, make_memory


class Meeting(Protocol):
    """A context manager; what the others need is in `file` and `descriptors`."""

    @property
    def file(self) -> str:
        """Where they meet; "" if in the memory of the second descriptor that comes with the invitation."""
        ...

    @property
    def descriptors(self) -> tuple[int, ...]: ...
    def group(self) -> RankGroup:
        """When all are there. Raises whatever keeps them apart, EngineDied after `give_up`."""
        ...

    def give_up(self) -> None:
        """Ends what waits for ranks that will not come, if it can be ended. From any thread."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def meeting(backend: str, size: int) -> Meeting:
    """In shared memory where this process has started the ranks and has the native extension, else over gloo."""
    return SharedMeeting(size) if backend == "mp" and can_share() else GlooMeeting(size)


class SharedMeeting:
    """Beyond the meeting, `give_up` ends every step that waits."""

    file = ""

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
        self._ranks.sum(torch.zeros(1))
        return self._ranks

    def give_up(self) -> None:
        self._ranks.give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)


class GlooMeeting:
    """At a file in a directory of its own. Ends early by `give_up`: a thread still waits for gloo to do so itself."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._closing = ExitStack()
        directory = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="pagewire-ranks-"))
        self.file = str(Path(directory) / "meeting")
        self.descriptors: tuple[int, ...] = ()
        self._is_over = threading.Event()
        self._group: RankGroup | None = None
        self._error: Exception | None = None

    def group(self) -> RankGroup:
        threading.Thread(target=self._meet, name="ranks-meeting", daemon=True).start()
        self._is_over.wait()
        if self._group is None:
            raise self._error or EngineDied("the ranks' meeting was given up")
        return self._group

    def _meet(self) -> None:
        from engine.parallel.process_ranks import ProcessRanks  # it imports torch.distributed

        try:
            self._group = ProcessRanks(Path(self.file), 0, self._size)
        except Exception as error:
            self._error = error
        self._is_over.set()

    def give_up(self) -> None:
        self._is_over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._closing.close()
