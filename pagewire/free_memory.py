"""Gives memory that a process has freed back to the system."""

import ctypes
from contextlib import suppress


def release_free_memory() -> None:
    """After something large and short-lived: glibc keeps what was freed in small pieces. Does nothing elsewhere."""
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
