"""What both ends of plane TCP say to each other, inside TLS if the workers speak it.

    sender → receiver    nonce, 32 random bytes
    receiver → sender    HMAC-SHA256(secret, "receiver" · nonce) · another nonce
    sender → receiver    HMAC-SHA256(secret, "sender" · that nonce)
    then, as often as wanted:
    receiver → sender    number of blocks u32, and of each its slot u32 and generation u64
    sender → receiver    the slots' generations u64 each; if they are those wanted, the blocks' bytes and generations
                         once more

Little endian. The secret is the sender's; it comes with the handshake, so whoever proves to know it was let in there.
"""

import hmac
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.transfer.plane import BLOCKS_PER_READ, PlaneUnavailable, RemoteBlock

SECRET_BYTES = 32
HELLO_SECONDS = 2.0
STALL_SECONDS = 10.0
IDLE_SECONDS = 120.0
"""The sender hangs up on who has asked for nothing for so long, be he frozen or gone without a word; no receiver uses a
connection again that has been idle for half of it."""
FLOOR_BYTES_PER_SECOND = 1 << 20  # an answer that comes slower is given up; computing KV again is faster
_PROOF_BYTES = 32
_COUNT = struct.Struct("<I")
_WANTED = struct.Struct("<IQ")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 2))


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """Where a worker's plane TCP listens, and the TLS of what it accepts and dials: its gRPC's. None is plaintext.

    `port` 0: the kernel chooses. `client_tls` is asked for each connection, since certificates are renewed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    server_tls: ssl.SSLContext | None = None
    client_tls: Callable[[], ssl.SSLContext] | None = None


def over_tls(connection: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    """An accepted connection, as it is from now on; it does not wait for the other side. Raises OSError."""
    if tls is None:
        return connection
    return tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def accept_peer(connection: socket.socket, secret: bytes) -> bytes:
    """The sender's side of the greeting, once the receiver has proven himself: what is left to send him.

    Raises OSError or PlaneUnavailable.
    """
    _prepare(connection)
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()
    nonce = secrets.token_bytes(_PROOF_BYTES)
    connection.sendall(nonce)
    answer = receive(connection, 2 * _PROOF_BYTES, HELLO_SECONDS)
    if not hmac.compare_digest(answer[:_PROOF_BYTES], _proof(secret, b"receiver", nonce)):
        raise PlaneUnavailable("it does not know the secret of the handshake")
    return _proof(secret, b"sender", answer[_PROOF_BYTES:])


def dial(host: str, port: int, secret: bytes, tls: Callable[[], ssl.SSLContext] | None) -> socket.socket:
    """The receiver's side; raises PlaneUnavailable. Blocks for `HELLO_SECONDS` for each step, most often for none."""
    try:
        connection = socket.create_connection((host, port), HELLO_SECONDS)
    except OSError as error:
        raise PlaneUnavailable(f"{host}:{port}: {error.strerror or error}") from None
    try:
        _prepare(connection)
        if tls is not None:
            connection = tls().wrap_socket(connection, server_hostname=host)
        nonce = secrets.token_bytes(_PROOF_BYTES)
        theirs = receive(connection, _PROOF_BYTES, HELLO_SECONDS)
        connection.sendall(_proof(secret, b"receiver", theirs) + nonce)
        if not hmac.compare_digest(receive(connection, _PROOF_BYTES, HELLO_SECONDS), _proof(secret, b"sender", nonce)):
            raise PlaneUnavailable(f"another process answers at {host}:{port}")
    except (OSError, ValueError) as error:  # ValueError: certificates that are being renewed
        connection.close()
        raise PlaneUnavailable(f"{host}:{port}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, num_bytes: int, seconds: float) -> bytes:
    """So many bytes, all within `seconds`. Raises OSError."""
    got, deadline = b"", time.monotonic() + seconds
    while len(got) < num_bytes:
        connection.settimeout(max(0.0, deadline - time.monotonic()) or 1e-6)
        more = connection.recv(num_bytes - len(got))
        if not more:
            raise ConnectionError("the other side has closed the connection")
        got += more
    connection.settimeout(seconds)
    return got


def answer_seconds(num_bytes: int) -> float:
    """So long an answer may take altogether, however steadily it trickles."""
    return STALL_SECONDS + num_bytes / FLOOR_BYTES_PER_SECOND


def pack_request(blocks: Sequence[RemoteBlock]) -> bytes:
    """Asks for blocks, `BLOCKS_PER_READ` at most."""
    wanted = (_WANTED.pack(block.slot, block.generation) for block in blocks)
    return _COUNT.pack(len(blocks)) + b"".join(wanted)


def receive_request(connection: socket.socket) -> tuple[list[int], list[int]] | None:
    """Slots and generations that are asked for; None when the receiver has hung up. It may be silent for `IDLE_SECONDS`
    before, but not within. Raises OSError or PlaneUnavailable."""
    connection.settimeout(IDLE_SECONDS)
    first = connection.recv(1)
    if not first:
        return None
    (count,) = _COUNT.unpack(first + receive(connection, _COUNT.size - 1, STALL_SECONDS))
    if not 0 < count <= BLOCKS_PER_READ:
        raise PlaneUnavailable(f"it asks for {count} blocks")
    wanted: Any = _WANTED.iter_unpack(receive(connection, count * _WANTED.size, STALL_SECONDS))
    slots, generations = zip(*wanted, strict=True)
    return list(slots), list(generations)


def hang_up(connection: socket.socket) -> None:
    """Ends what another thread does with the connection."""
    with suppress(OSError):  # it is closed already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # an SSLSocket's own would pull its state from under it


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(HELLO_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + nonce, "sha256")
