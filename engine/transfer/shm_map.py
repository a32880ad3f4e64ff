"""Plane SHM_MAP, receiver: maps the sender's pool, a memfd handed over an abstract Unix socket (11 GB/s in huge pages).

The hand-over, sender's side in `pool_server.py`: the receiver connects and sends one byte, `P` (pool) or `R` (ring);
the answer is 16 bytes (the token from the handshake) and two file descriptors: data and generations.
"""

import array
import ctypes
import mmap
import os
import socket
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.transfer.landing import Landing
from engine.transfer.plane import Plane, PlaneUnavailable, RemoteBlock, SharedPoolInfo
from engine.transfer.shm_vm import check_generations, check_slots, hot_runs, verify_copies

ASK_POOL = b"P"
ASK_RING = b"R"
TOKEN_BYTES = 16
_TIMEOUT_SECONDS = 2.0


class MappedBlocks:
    """Blocks and their generations, mapped read-only from two file descriptors of the sender."""

    def __init__(self, data_fd: int, generations_fd: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        data_bytes, generations_bytes = os.fstat(data_fd).st_size, os.fstat(generations_fd).st_size
        if generations_bytes // 8 * block_bytes > data_bytes:
            raise PlaneUnavailable(f"{data_bytes} bytes for {generations_bytes // 8} blocks of {block_bytes}")
        data = mmap.mmap(data_fd, data_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        generations = mmap.mmap(generations_fd, generations_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._data: NDArray[np.uint8] | None = np.frombuffer(data, np.uint8)
        self._generations: NDArray[np.uint64] | None = np.frombuffer(generations, np.uint64)

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        """As `BlockReceiver.read`."""
        data, generations = self._data, self._generations
        if data is None or generations is None:
            raise PlaneUnavailable("closed")
        check_slots(blocks, len(generations))
        base = data.ctypes.data
        for some, here in hot_runs(blocks, addresses, self._block_bytes):
            slots = [block.slot for block in some]
            check_generations(some, generations[slots].tolist())
            for block, address in zip(some, here, strict=True):
                ctypes.memmove(address, base + block.slot * self._block_bytes, self._block_bytes)
            check_generations(some, generations[slots].tolist())
            verify_copies(some, here, self._block_bytes)

    def close(self) -> None:
        """Lets go of the mappings; each is unmapped with its last view."""
        self._data = self._generations = None


def connect(info: SharedPoolInfo, what: bytes) -> tuple[socket.socket, int, int]:
    """The connected socket and the fds of data and generations; the caller closes all three."""
    if not info.socket_name:
        raise PlaneUnavailable("the sender offers no socket")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TIMEOUT_SECONDS)
        connection.connect("\0" + info.socket_name)
        connection.sendall(what)
        token, fds = _receive(connection)
    except OSError as error:
        connection.close()
        raise PlaneUnavailable(f"socket {info.socket_name}: {error.strerror or error}") from None
    if token != info.token or len(fds) != 2:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise PlaneUnavailable("the sender has nothing to map" if not fds else "another process answers at the socket")
    return connection, fds[0], fds[1]


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    token, ancillary, _, _ = connection.recvmsg(TOKEN_BYTES, socket.CMSG_LEN(2 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return token, fds.tolist()


class MapReceiver:
    """Reads a sender's pool through a mapping of it."""

    plane = Plane.SHM_MAP

    def __init__(self, info: SharedPoolInfo, block_bytes: int) -> None:
        connection, data_fd, generations_fd = connect(info, ASK_POOL)
        connection.close()
        try:
            if os.fstat(data_fd).st_size < info.pool_bytes:
                raise PlaneUnavailable(f"{os.fstat(data_fd).st_size} bytes to map of a pool of {info.pool_bytes}")
            self._blocks = MappedBlocks(data_fd, generations_fd, block_bytes)
        finally:
            os.close(data_fd)
            os.close(generations_fd)

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        self._blocks.read(blocks, addresses)

    def close(self) -> None:
        self._blocks.close()
