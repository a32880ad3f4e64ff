"""Plane TCP, receiver: asks the sender for blocks and receives them straight into this worker's own.

    generations as in the manifest? → receive → generations → checksums of the copies, made while they are in the cache

Nothing lands behind a read: whatever happens, this thread alone writes to its targets.
"""

import ctypes
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

from engine.transfer.checksum import checksum_at
from engine.transfer.landing import Landing
from engine.transfer.plane import BLOCKS_PER_READ, Plane, PlaneUnavailable, RemoteBlock, SharedPoolInfo
from engine.transfer.shm_vm import check_checksums, check_generations, check_slots
from engine.transfer.tcp_wire import IDLE_SECONDS, STALL_SECONDS, answer_seconds, dial, pack_request

_LOOK_SECONDS = 0.1  # so long a read that was stopped may wait for a silent sender


class TcpReceiver:
    """Reads a sender's pool over its own connections: one for each read that runs at the same time."""

    plane = Plane.TCP

    def __init__(
        self, info: SharedPoolInfo, block_bytes: int, host: str, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        if not info.tcp_port:
            raise PlaneUnavailable("the sender does not listen")
        self._info = info
        self._block_bytes = block_bytes
        self._num_slots = info.pool_bytes // block_bytes
        self._host = host
        self._tls = tls
        self._lock = threading.Lock()
        self._is_open = True
        self._idle = [(self._dial(), time.monotonic())]  # and since when, the latest last

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        check_slots(blocks, self._num_slots)
        landing = landing or Landing()
        connection = self._take()
        is_idle = False
        try:
            for start in range(0, len(blocks), BLOCKS_PER_READ):
                stop, is_idle = start + BLOCKS_PER_READ, False
                found = self._receive_blocks(connection, blocks[start:stop], addresses[start:stop], landing)
                is_idle = True
                check_checksums(blocks[start:stop], found)
        except OSError as error:
            raise PlaneUnavailable(f"a read from {self._host}: {error.strerror or error}") from None
        finally:
            self._put_back(connection, is_idle)

    def close(self) -> None:
        """A connection that is being read from is closed when that read ends."""
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def _receive_blocks(
        self, connection: socket.socket, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing
    ) -> list[int]:
        """The checksums of the copies; the blocks had their generations before and after."""
        answer = _Answer(connection, self._host, len(blocks) * self._block_bytes, landing)
        connection.settimeout(STALL_SECONDS)
        connection.sendall(pack_request(blocks))
        connection.settimeout(_LOOK_SECONDS)
        check_generations(blocks, answer.words(len(blocks)))
        found = []
        for address in addresses:
            target = (ctypes.c_char * self._block_bytes).from_address(address)
            answer.receive_into(memoryview(target).cast("B"))
            found.append(checksum_at(address, self._block_bytes))
        check_generations(blocks, answer.words(len(blocks)))
        return found

    def _take(self) -> socket.socket:
        with self._lock:
            if not self._is_open:
                raise PlaneUnavailable("closed")
            while self._idle:
                connection, since = self._idle.pop()
                if time.monotonic() - since < IDLE_SECONDS / 2:
                    return connection
                connection.close()  # the sender is about to hang up on it, or has
        return self._dial()

    def _put_back(self, connection: socket.socket, is_idle: bool) -> None:
        """`is_idle`: its last answer was read to the end."""
        with self._lock:
            if is_idle and self._is_open:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def _dial(self) -> socket.socket:
        return dial(self._host, self._info.tcp_port, self._info.tcp_secret, self._tls)


class _Answer:
    """One answer while it comes. Raises OSError, and PlaneUnavailable when it is late or nobody wants it any more."""

    def __init__(self, connection: socket.socket, host: str, num_bytes: int, landing: Landing) -> None:
        self._connection = connection
        self._host = host
        self._landing = landing
        self._seconds = answer_seconds(num_bytes)
        self._deadline = time.monotonic() + self._seconds

    def words(self, count: int) -> tuple[int, ...]:
        """The u64 words that come next."""
        words = bytearray(8 * count)
        self.receive_into(memoryview(words))
        return struct.unpack(f"<{count}Q", words)

    def receive_into(self, view: memoryview) -> None:
        """Fills `view` with what comes next."""
        got, now = 0, time.monotonic()
        silent_until = now + STALL_SECONDS
        while got < len(view):
            if self._landing.is_stopped:
                raise PlaneUnavailable(f"a read from {self._host} was stopped")
            if now > self._deadline:
                raise PlaneUnavailable(f"{self._host} did not send all of it in {self._seconds:.3g} s")
            try:
                num_bytes = self._connection.recv_into(view[got:])
            except TimeoutError:
                now = time.monotonic()
                if now > silent_until:
                    raise PlaneUnavailable(f"{self._host} was silent for {STALL_SECONDS:g} s") from None
                continue
            if not num_bytes:
                raise PlaneUnavailable(f"{self._host} has closed the connection")
            got, now = got + num_bytes, time.monotonic()
            silent_until = now + STALL_SECONDS
