"""When memory that a process has freed goes back to the system. Nothing of it does anything without glibc."""

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEPT_PIECE = 32 << 20
_KEPT_END = 64 << 20


def release_free_memory() -> None:
    """After something large and short-lived: glibc keeps what was freed in small pieces."""
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def keep_free_memory() -> None:
    """For a process that goes on freeing and wanting pieces of a MiB, as gRPC does with large messages.

    Else glibc gives each back, and the kernel fills the next one with zeros page by page: a third of the CPU time of
    pulling blocks over gRPC. With time glibc comes to these two numbers by itself, if pieces so large are freed.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_PIECE)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_END)
