"""The sender's side of the one-sided planes: says where the pool lies, hands out memfds, owns the ring."""

import array
import asyncio
import ctypes
import logging
import os
import secrets
import socket
import struct
from contextlib import suppress

from engine.transfer.block_io import Bytes
from engine.transfer.nixl_agent import NixlAgent, Region
from engine.transfer.plane import KvPool, Plane, PlaneUnavailable, SharedPoolInfo, block_bytes, is_host_visible
from engine.transfer.shm_map import ASK_POOL, ASK_RING, TOKEN_BYTES
from engine.transfer.shm_ring import ACK, SendRing
from engine.transfer.shm_vm import allow_readers
from engine.transfer.tcp_server import TcpServer

logger = logging.getLogger(__name__)

_RING_BYTES = 8 << 20
_MAX_RING_SLOTS = 64
_MIN_RING_SLOTS = 2
_PEER_CREDENTIALS = struct.Struct("3i")


class RingLease:
    """The ring slots one pull holds; freed together when the pull ends, however it ends."""

    def __init__(self, server: "PoolServer", ring: SendRing) -> None:
        self._server = server
        self._ring = ring
        self._taken: set[tuple[int, int]] = set()

    @property
    def has_free_slot(self) -> bool:
        return self._ring.num_free > 0

    async def wait_for_slot(self) -> None:
        """Returns when a slot is free. The caller checks again that it may read the block it is going to put."""
        while not self._ring.num_free:
            await self._server.wait_for_slot()

    def put(self, block: Bytes) -> tuple[int, int]:
        """Copies a block into a free slot; returns (slot, generation)."""
        slot = self._ring.put(block)
        self._taken.add(slot)
        return slot

    async def wait_until_read(self) -> None:
        """Returns when everything that was put has been acknowledged."""
        while self._taken:
            self._taken = {taken for taken in self._taken if self._ring.holds(*taken)}
            if self._taken:
                await self._server.wait_for_slot()

    def close(self) -> None:
        """Frees what was not acknowledged."""
        for slot, generation in self._taken:
            self._ring.free(slot, generation)
        self._taken.clear()
        self._server.wake()


class PoolServer:
    """Lets processes of the same user on the same host read this pool, with `agent` those of other NIXL agents, and
    with `tcp` those that this worker's handshake lets in.

    It owns both; `agent` is None without one that can read and share the pool. Lives on one event loop.
    """

    def __init__(self, pool: KvPool, agent: NixlAgent | None = None, tcp: TcpServer | None = None) -> None:
        self.pool = pool
        self.agent = agent
        self._tcp = tcp
        self._token = ctypes.create_string_buffer(secrets.token_bytes(TOKEN_BYTES), TOKEN_BYTES)
        if agent is not None:
            self._share(agent)
        self._name = f"pagewire-{os.getpid()}-{secrets.token_hex(8)}"
        self._ring: SendRing | None = None
        self._slot_freed = asyncio.Event()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Planes this sender can try, best first. Mapping needs a pool in a memfd.

        A pool in device memory nobody else can read: what is copied out of it is sent, or put into the ring.
        """
        tcp = (Plane.TCP,) if self._tcp is not None else ()
        if not is_host_visible(self.pool):
            return (Plane.SHM_RING, *tcp, Plane.GRPC)
        mapped = (Plane.SHM_MAP,) if self.pool.fd is not None and self.pool.generations_fd is not None else ()
        nixl = (Plane.NIXL,) if self.agent is not None else ()
        return (*mapped, Plane.SHM_VM, Plane.SHM_RING, *nixl, *tcp, Plane.GRPC)

    @property
    def info(self) -> SharedPoolInfo:
        """What the handshake tells."""
        return SharedPoolInfo(
            pid=os.getpid(),
            pool_address=self.pool.address,
            generations_address=self.pool.generations_address,
            pool_bytes=len(self.pool.generations) * block_bytes(self.pool),
            socket_name=self._name if self._listener is not None else "",
            token=self._token.raw,
            token_address=ctypes.addressof(self._token),
            nixl_metadata=b"" if self.agent is None else self.agent.metadata,
            tcp_port=0 if self._tcp is None else self._tcp.port,
            tcp_secret=b"" if self._tcp is None else self._tcp.secret,
        )

    def start(self) -> None:
        """Opens the sockets; needs a running event loop. Raises BindError."""
        allow_readers()
        if self._tcp is not None:
            self._tcp.start()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind("\0" + self._name)
        self._listener.listen()
        self._spawn_accept()

    async def close(self) -> None:
        """Ends every connection, frees the ring and closes the agent: nothing is read or written any more."""
        if self.agent is not None:
            self.agent.close()
        if self._tcp is not None:
            self._tcp.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def open_ring_lease(self) -> RingLease:
        """For one pull; the caller closes it."""
        return RingLease(self, self._open_ring())

    async def wait_for_slot(self) -> None:
        """Returns after some slot was freed."""
        self._slot_freed.clear()
        await self._slot_freed.wait()

    def wake(self) -> None:
        """Tells waiting pulls that slots were freed."""
        self._slot_freed.set()

    def _share(self, agent: NixlAgent) -> None:
        """The worker goes on without the agent if its memory cannot be registered."""
        generations = Region(self.pool.generations_address, self.pool.generations.nbytes)
        token = Region(ctypes.addressof(self._token), TOKEN_BYTES)
        try:
            agent.share([Region(self.pool.address, self.pool.buffer.nbytes), generations, token])
        except PlaneUnavailable as error:
            logger.warning("kv transfer: no plane NIXL, the next one is used: %s", error)
            agent.close()
            self.agent = None

    def _open_ring(self) -> SendRing:
        if self._ring is None:
            size = block_bytes(self.pool)
            self._ring = SendRing(max(_MIN_RING_SLOTS, min(_MAX_RING_SLOTS, _RING_BYTES // size)), size)
        return self._ring

    def _spawn_accept(self) -> None:
        assert self._listener is not None
        self._track(asyncio.create_task(self._accept(self._listener), name="pool-server-accept"))

    def _track(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            self._track(asyncio.create_task(self._serve(connection), name="pool-server-peer"))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, suppress(OSError):
            connection.setblocking(False)
            if _peer_uid(connection) != os.getuid():
                return
            asked = await loop.sock_recv(connection, 1)
            fds = self._fds(asked)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
            try:
                connection.sendmsg([self._token.raw], rights)
            finally:
                for fd in fds:
                    os.close(fd)
            if asked == ASK_RING:
                await self._take_acks(connection)

    def _fds(self, asked: bytes) -> tuple[int, ...]:
        if asked == ASK_RING:
            ring = self._open_ring()
            return _read_only(ring.data_fd), _read_only(ring.generations_fd)
        if asked == ASK_POOL and self.pool.fd is not None and self.pool.generations_fd is not None:
            return _read_only(self.pool.fd), _read_only(self.pool.generations_fd)
        return ()

    async def _take_acks(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pending = b""
        while data := await loop.sock_recv(connection, 4096):
            pending += data
            whole = len(pending) - len(pending) % ACK.size
            for slot, generation in ACK.iter_unpack(pending[:whole]):
                if self._ring is not None:
                    self._ring.free(slot, generation)
            pending = pending[whole:]
            self.wake()


def _peer_uid(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(packed)[1])


def _read_only(fd: int) -> int:
    """The same memory through a descriptor that cannot write."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
