"""How ranks on other machines reach rank 0: over TCP, at one address of its machine.

Both sides prove that they know the token that the launcher gave the ranks (multiprocessing's HMAC challenge) before one
reads a message of the other. What they then say is neither encrypted nor signed, as is what gloo sends beside it: the
network between the machines must be trusted.
"""

import logging
import os
import secrets
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from engine.parallel.connection import watch_the_other_side
from engine.parallel.launch import Arrival

HELLO_SECONDS = 5.0
"""For a process that has connected to prove itself and to say which rank it is."""
_HELLO = struct.Struct("<II")

logger = logging.getLogger(__name__)


class NetworkListener:
    """Where ranks connect: `address` (host, port), with the `token` that is theirs alone to know."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_bytes(32)
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def accept(self, timeout: float) -> Arrival | None:
        """The next rank; None if none connects in time, or a stranger does, who may take HELLO_SECONDS more."""
        self._listener.settimeout(timeout)
        try:
            peer, where = self._listener.accept()
        except TimeoutError:
            return None
        with peer:
            peer.setblocking(True)
            watch_the_other_side(peer)
            try:
                rank, pid = self._hear(peer)
            except (OSError, EOFError, AuthenticationError, struct.error) as error:
                logger.warning("a process at %s has connected to the ranks' port and is refused: %r", where[0], error)
                return None
            return Arrival(rank, pid, peer.dup())

    def close(self) -> None:
        self._listener.close()

    def _hear(self, peer: socket.socket) -> tuple[int, int]:
        """Its rank and process."""
        patience = threading.Timer(HELLO_SECONDS, peer.shutdown, (socket.SHUT_RDWR,))
        patience.start()
        connection: Connection[Any, Any] = Connection(os.dup(peer.fileno()))
        try:
            with connection:
                deliver_challenge(connection, self.token)
                answer_challenge(connection, self.token)
                rank, pid = _HELLO.unpack(connection.recv_bytes(_HELLO.size))
                return rank, pid
        finally:
            patience.cancel()
            patience.join()


def connect_over_network(address: tuple[str, int], token: bytes, rank: int) -> socket.socket:
    """Rank 0, as this rank. Raises OSError, or AuthenticationError if somebody else listens there."""
    connecting = socket.create_connection(address, timeout=HELLO_SECONDS)
    connecting.setblocking(True)
    watch_the_other_side(connecting)
    connection: Connection[Any, Any] = Connection(os.dup(connecting.fileno()))
    try:
        with connection:
            answer_challenge(connection, token)
            deliver_challenge(connection, token)
            connection.send_bytes(_HELLO.pack(rank, os.getpid()))
    except BaseException:
        connecting.close()
        raise
    return connecting
