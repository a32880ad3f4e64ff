"""Plane TCP, sender: answers reads of its pool's blocks to whoever knows the secret of the handshake.

A thread accepts, and each connection has one of its own: bytes go from the pool to the kernel without the event loop.
A slot that was given to somebody else is of another generation, and is not sent; nor is what lies outside the pool.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from engine.transfer.block_io import BlockIo
from engine.transfer.plane import KvPool, PlaneUnavailable
from engine.transfer.tcp_wire import (
    SECRET_BYTES,
    STALL_SECONDS,
    TcpSettings,
    accept_peer,
    hang_up,
    over_tls,
    receive_request,
)
from pagewire.ports import check_bindable

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256
_MAX_STRANGERS = 64  # of those that have not proven yet that they know the secret
_SEND_BYTES = 1 << 20  # as much has to go out in STALL_SECONDS
_NO_FD_SECONDS = 1.0
_LOG_EVERY_SECONDS = 60.0


class TcpServer:
    """Its methods are for one thread; those that serve are its own. `secret` is for the handshake only."""

    def __init__(self, pool: KvPool, settings: TcpSettings, staging: BlockIo | None = None) -> None:
        """`staging`: for a pool in device memory."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._pool = pool
        self._settings = settings
        self._staging = staging
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._strangers: dict[threading.Thread, socket.socket] = {}  # of those, the oldest first
        self._closed = threading.Event()
        self.num_turned_away = 0  # who did not prove himself
        self._logged_at = float("-inf")
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def port(self) -> int:
        """0 unless it listens."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Raises BindError."""
        host, port = self._settings.host, self._settings.port
        check_bindable(host, port)
        is_v6 = ":" in host
        self._listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
        )
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener,), name="kv-tcp-accept", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Ends every connection; when it returns nobody reads the pool any more. Idempotent."""
        self._closed.set()
        if self._listener is None or self._acceptor is None:
            return
        hang_up(self._listener)
        self._acceptor.join()
        with self._lock:
            serving = dict(self._connections)
        for connection in serving.values():
            hang_up(connection)
        for thread in serving:
            thread.join()
        self._listener.close()
        self._listener = self._acceptor = None

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = listener.accept()
            except OSError as error:
                if not self._closed.wait(_NO_FD_SECONDS):
                    logger.warning("kv transfer: plane TCP accepts nobody: %s", error)
                continue
            try:
                connection = over_tls(connection, self._settings.server_tls)
            except OSError:  # it has hung up already
                connection.close()
                continue
            self._start_serving(connection, peer[0])

    def _start_serving(self, connection: socket.socket, peer: str) -> None:
        """Of strangers the newest are served: whoever proves himself is through before 64 others come."""
        thread = threading.Thread(target=self._serve, args=(connection, peer), name="kv-tcp-serve", daemon=True)
        with self._lock:
            if len(self._strangers) >= _MAX_STRANGERS:
                hang_up(self._strangers.pop(next(iter(self._strangers))))
            if len(self._connections) >= _MAX_CONNECTIONS:
                connection.close()
                return
            self._connections[thread] = self._strangers[thread] = connection
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("kv transfer: plane TCP cannot serve %s: %s", peer, error)
            self._end(thread, connection)

    def _serve(self, connection: socket.socket, peer: str) -> None:
        me, is_known = threading.current_thread(), False
        try:
            greeting = accept_peer(connection, self.secret)
            is_known = True
            with self._lock:
                self._strangers.pop(me, None)  # before he knows, and so may stop waiting for us
            connection.sendall(greeting)
            while not self._closed.is_set() and (wanted := receive_request(connection)) is not None:
                self._answer(connection, *wanted)
        except (OSError, PlaneUnavailable) as error:
            if self._closed.is_set():
                return
            if is_known:
                logger.info("kv transfer: a connection to plane TCP from %s ended: %s", peer, error)
            else:
                self._note_stranger(peer, error)
        finally:
            self._end(me, connection)

    def _note_stranger(self, peer: str, error: Exception) -> None:
        """Anybody may dial, as often as he likes: one line a minute says it."""
        with self._lock:
            self.num_turned_away += 1
            now = time.monotonic()
            if now - self._logged_at < _LOG_EVERY_SECONDS:
                return
            self._logged_at, count = now, self.num_turned_away
        logger.info("kv transfer: plane TCP turned %s away (%d strangers so far): %s", peer, count, error)

    def _end(self, thread: threading.Thread, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._strangers.pop(thread, None)
            del self._connections[thread]

    def _answer(self, connection: socket.socket, slots: list[int], generations: list[int]) -> None:
        if max(slots) >= len(self._pool.generations):
            raise PlaneUnavailable(f"it asks for slot {max(slots)} of {len(self._pool.generations)}")
        now = self._pool.generations[slots]
        connection.settimeout(STALL_SECONDS)
        connection.sendall(now.tobytes())
        if now.tolist() != generations:
            return
        for piece in self._pieces(slots):
            connection.sendall(piece)
        connection.sendall(self._pool.generations[slots].tobytes())

    def _pieces(self, slots: Sequence[int]) -> Iterator[memoryview]:
        """The blocks' bytes; those of neighbours at once, `_SEND_BYTES` at most."""
        if self._staging is not None:
            yield from _copied(self._staging, slots)
            return
        begin = 0
        for i in range(1, len(slots) + 1):
            if i < len(slots) and slots[i] - slots[i - 1] == 1:
                continue
            run = memoryview(self._pool.buffer[slots[begin] : slots[i - 1] + 1].reshape(-1))  # type: ignore[arg-type]
            for start in range(0, len(run), _SEND_BYTES):
                yield run[start : start + _SEND_BYTES]
            begin = i


def _copied(staging: BlockIo, slots: Sequence[int]) -> Iterator[memoryview]:
    """A lane is not held while a peer takes its bytes."""
    for start in range(0, len(slots), staging.most):
        with staging.reading(slots[start : start + staging.most]) as rows:
            copies = [row.copy() for row in rows]
        yield from (copy.data for copy in copies)
