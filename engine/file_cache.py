"""A directory of files that processes map while they use them: bounded in size, the longest unused deleted first.

A user holds a shared lock on the file for as long as it has it mapped, which the kernel drops with the last mapping's
descriptor, however the process ends. Only what nobody holds is deleted, and who opened a file just before that maps it
all the same.

    NAME            the content, its modification time the last use
    NAME.lock       held by whoever makes it
    NAME.partial    what a maker has so far
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Hold the lock of the maker, which the kernel drops if this process dies."""
    with lock_file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def hold(descriptor: int) -> None:
    """Keep the file from being deleted until the last copy of `descriptor` is closed, a mapping's own included."""
    with suppress(OSError):  # a file system without locks: `prune` can't lock there either, and deletes nothing
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def mark_used(file: Path) -> None:
    """Make it the last to be deleted."""
    with suppress(OSError):  # another user's file
        os.utime(file)


def prune(directory: Path, max_bytes: int) -> None:
    """Delete unused files, the longest unused first, until all take at most `max_bytes`; and what dead makers left."""
    files = []
    for path in directory.iterdir():
        if path.suffix == ".partial":
            _remove_abandoned(path)
        elif path.suffix != ".lock":
            with suppress(OSError):
                stat = path.stat()
                files.append((stat.st_mtime_ns, path, stat.st_size))
    total = sum(size for _, _, size in files)
    for _, path, size in sorted(files):
        if total <= max_bytes:
            return
        if _remove_unused(path):
            total -= size
            logger.info("deleted %s (%d bytes): the longest unused, and all took more than %d", path, size, max_bytes)
    if total > max_bytes:
        logger.warning("%s takes %d bytes, more than its %d: all of it is in use", directory, total, max_bytes)


def _remove_unused(path: Path) -> bool:
    with _locked(path) as locked:
        if locked:
            path.unlink(missing_ok=True)
        return locked


def _remove_abandoned(partial: Path) -> None:
    with _locked(partial.with_suffix(".lock")) as locked:
        if locked:
            partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether nobody else had a lock on it; then this process has it inside."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
