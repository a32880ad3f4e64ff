"""A value that is read from files, and read again when one of them changes."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Watched(Generic[T]):
    """`get` looks at the files at most every `period` seconds. Thread-safe.

    Made, it reads at once and raises what `read` raises (ValueError, OSError). Later a value that cannot be read (a
    key that does not fit the certificate that was not replaced yet) is logged, and the old one stays.
    """

    def __init__(
        self,
        name: str,
        paths: Iterable[Path],
        read: Callable[[], T],
        *,
        clock: Callable[[], float] = time.monotonic,
        period: float = 1.0,
    ) -> None:
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._period = period
        self._lock = threading.Lock()
        # Before the reading: a change in between is seen at the next look.
        self._stamp = self._look()
        self._value = read()
        self._next_look = clock() + period
        self.version = 0

    def get(self) -> T:
        """The newest good value. `version` counts its changes."""
        with self._lock:
            now = self._clock()
            if now < self._next_look:
                return self._value
            self._next_look = now + self._period
            stamp = self._look()
            if stamp == self._stamp:
                return self._value
            self._stamp = stamp
            try:
                self._value = self._read()
            except (OSError, ValueError) as error:
                logger.warning("%s changed and cannot be used, what was read before stays: %s", self._name, error)
            else:
                self.version += 1
                logger.info("%s read again", self._name)
            return self._value

    def _look(self) -> tuple[object, ...]:
        """Kubernetes swaps a symlink, others write or rename: inode, time or size differ."""
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
