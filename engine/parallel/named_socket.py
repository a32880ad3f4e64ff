"""A Unix socket with a name, for ranks that can't inherit one: those of Ray, which other processes start.

The name is in Linux's abstract namespace, where permissions mean nothing: any user may connect to it, or take a name
that is free. So both sides ask the kernel whose process is at the other end before they read a byte from it, and rank 0
hears only who shows the token that the launcher gave its ranks.
"""

import logging
import os
import secrets
import socket
import struct
import time
from contextlib import suppress

from engine.parallel.launch import Arrival

HELLO_SECONDS = 2.0
"""For a process of this user that has connected to say which rank it is."""
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sII")
_CREDENTIALS = struct.Struct("3i")

logger = logging.getLogger(__name__)


class RankListener:
    """Where ranks connect: `address` and `token` are theirs alone to know."""

    def __init__(self) -> None:
        self.address = f"pagewire-ranks-{os.getpid()}-{secrets.token_hex(8)}"
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind("\0" + self.address)
            self._listener.listen()
        except BaseException:
            self._listener.close()
            raise

    def accept(self, timeout: float) -> Arrival | None:
        """The next rank; None if none connects in time, or somebody else does, who may take HELLO_SECONDS more."""
        self._listener.settimeout(timeout)
        try:
            peer, _ = self._listener.accept()
        except TimeoutError:
            return None
        with peer:
            uid = peer_uid(peer)
            if uid != os.getuid():
                logger.warning("a process of user %d has connected to the ranks' socket and is refused", uid)
                return None
            try:
                token, rank, pid = _HELLO.unpack(_receive(peer, _HELLO.size, HELLO_SECONDS))
            except OSError as error:
                logger.warning("a process has connected to the ranks' socket and is refused: %s", error)
                return None
            if not secrets.compare_digest(token, self.token):
                logger.warning("a process has connected to the ranks' socket with another token and is refused")
                return None
            peer.setblocking(True)
            return Arrival(rank, pid, peer.dup())

    def close(self) -> None:
        self._listener.close()


def connect_rank(address: str, token: bytes, rank: int) -> socket.socket:
    """Rank 0, as this rank. Raises PermissionError if another user's process listens there, else OSError."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connecting.connect("\0" + address)
        uid = peer_uid(connecting)
        if uid != os.getuid():
            raise PermissionError(f"rank 0 is user {os.getuid()}, but user {uid} listens at its socket {address}")
        connecting.sendall(_HELLO.pack(token, rank, os.getpid()))
    except BaseException:
        connecting.close()
        raise
    return connecting


def peer_uid(connection: socket.socket) -> int:
    """The user who connected, or who listens, as the kernel says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _receive(peer: socket.socket, num_bytes: int, timeout: float) -> bytes:
    """So many bytes, all within `timeout`. Raises TimeoutError, or ConnectionError if it closes before."""
    deadline = time.monotonic() + timeout
    received = b""
    with suppress(TimeoutError):
        while len(received) < num_bytes and (left := deadline - time.monotonic()) > 0:
            peer.settimeout(left)
            data = peer.recv(num_bytes - len(received))
            if not data:
                raise ConnectionError(f"it has said {len(received)} of {num_bytes} bytes and closed")
            received += data
    if len(received) < num_bytes:
        raise TimeoutError(f"it has said {len(received)} of {num_bytes} bytes in {timeout:g} s")
    return received
