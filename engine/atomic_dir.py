"""A directory that appears complete or not at all, also when its maker is killed, and that is made once."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path | None]:
    """Yields an empty directory beside `out` to fill; it is renamed to `out` when the block ends well.

    Yields None if `out` exists already. Another process that makes the same directory is waited for. What a killed
    process left is cleared by the next one.
    """
    partial = out.with_name(f".{out.name}.partial")
    with _locked(partial):
        if out.exists():
            shutil.rmtree(partial)
            yield None
            return
        for left_over in partial.iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        try:
            yield partial
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Makes `directory` and holds an exclusive lock on it; the kernel drops the lock of a killed process."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # its maker has just renamed it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_same(descriptor, directory):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def _is_same(descriptor: int, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    except FileNotFoundError:
        return False
