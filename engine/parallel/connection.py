"""What is done to the socket of a connection between rank 0 and another rank, be it a Unix or a TCP one."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

KEEP_ALIVE_SECONDS = 30
"""A machine that does not answer for so long is gone, and its ranks with it."""
_TIMEVAL = struct.Struct("ll")


def limit_sending(connection: "Connection[Any, Any]", seconds: float) -> None:
    """A send that gets nothing away for so long raises BlockingIOError."""
    with socket_of(connection) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))


def shut_down(connection: "Connection[Any, Any]") -> None:
    """Wakes whoever reads it, on both sides. Raises OSError if it is closed."""
    with socket_of(connection) as own:
        own.shutdown(socket.SHUT_RDWR)


@contextmanager
def socket_of(connection: "Connection[Any, Any]") -> Iterator[socket.socket]:
    """The connection's own, while the context lasts."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        yield own


def watch_the_other_side(tcp: socket.socket) -> None:
    """So that a machine which has lost its power or its network is noticed, in KEEP_ALIVE_SECONDS."""
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS // 3),
        (socket.TCP_KEEPINTVL, KEEP_ALIVE_SECONDS // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, KEEP_ALIVE_SECONDS * 1000),
    ):
        tcp.setsockopt(socket.IPPROTO_TCP, option, value)
