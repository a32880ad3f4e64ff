"""One incarnation of another worker that this one pulls from: its channel, plane, tickets and heartbeat."""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from engine.transfer.negotiate import Means, boot_id, open_receiver
from engine.transfer.nixl_agent import NixlAgent
from engine.transfer.plane import BlockReceiver, Plane, PlaneUnavailable, SharedPoolInfo
from pagewire.errors import FailedPrecondition, PagewireError, Unavailable
from pagewire.worker_view import WorkerDescription
from transfer_svc.client import Attached, AttachedPrefix, TransferClient

logger = logging.getLogger(__name__)

RPC_TIMEOUT = 5.0
_IDLE_HEARTBEAT = 5.0
# While tickets are held: a peer that hangs is noticed this much plus RPC_TIMEOUT later, however long the lease.
_BUSY_HEARTBEAT = 2.0
# Between two attempts to be seen by a peer.
_FIRST_HOLD_PAUSE, _LAST_HOLD_PAUSE = 0.05, 2.0
_READS_PER_PEER = 2

InThread = Callable[..., Coroutine[Any, Any, Any]]


class Peer:
    """One incarnation of one other worker. `plane` is what pulls use; `receiver` is None for gRPC.

    `turns`: so many reads wait for it at a time, lest a frozen peer take the threads of the others.

    `hangs`: it was given up since it does not answer, though the connection stands.
    """

    def __init__(
        self,
        endpoint: str,
        channel: grpc.aio.Channel,
        me: WorkerDescription,
        in_thread: InThread,
        agent: NixlAgent | None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.client = TransferClient(channel, me)
        self.plane = Plane.GRPC
        self.receiver: BlockReceiver | None = None
        self.turns = asyncio.Semaphore(_READS_PER_PEER)
        self.held: dict[bytes, int] = {}
        self.lease_seconds = 3 * _IDLE_HEARTBEAT
        self.num_users = 0
        self.is_retired = False
        self.hangs = False
        self._attached = asyncio.Event()
        self._choosing = asyncio.Lock()
        self._channel = channel
        self._me = me
        self._in_thread = in_thread
        self._means = Means(agent, endpoint.rpartition(":")[0].strip("[]"), tls)
        self._planes: tuple[Plane, ...] = ()
        self._pool: SharedPoolInfo | None = None
        self._old_receivers: list[BlockReceiver] = []
        self._is_lost = False
        self._scopes: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def while_it_answers(self) -> AsyncIterator[None]:
        """Raises Unavailable out of whatever the body awaits once the peer is given up."""
        try:
            async with asyncio.timeout(0 if self._is_lost else None) as scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            if not self._is_lost:
                raise
            raise Unavailable(f"{self.endpoint} does not answer") from None

    def give_up(self, *, hangs: bool) -> None:
        """Its heartbeat failed: what waits for it need not wait for a connection to break, too."""
        if self._is_lost:
            return
        self._is_lost, self.hangs = True, hangs
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async def connect(self, incarnation: int, wanted: Sequence[Plane]) -> None:
        """Handshake, and the best plane that works. Raises PagewireError."""
        offer = await self.client.handshake(wanted, boot_id(), os.getpid(), RPC_TIMEOUT)
        if offer.incarnation != incarnation:
            raise Unavailable(f"{self.endpoint} has restarted: incarnation {offer.incarnation}, not {incarnation}")
        self._planes, self._pool = offer.planes, offer.pool
        try:
            await self._choose_plane()
        except Unavailable as error:
            raise FailedPrecondition(
                f"{error.message}; this worker allows {', '.join(plane.name for plane in wanted)}", reason="NO_PLANE"
            ) from None
        allowed = ", ".join(plane.name for plane in wanted)
        logger.info("kv transfer from %s: plane %s of %s", self.endpoint, self.plane.name, allowed)

    async def demote(self, plane: Plane, reason: str) -> None:
        """Pulls use the next plane from now on; does nothing if another pull has demoted this one already."""
        async with self._choosing:
            if plane is not self.plane:
                return
            logger.warning("kv transfer from %s: plane %s broke: %s", self.endpoint, plane.name, reason)
            self._planes = self._planes[self._planes.index(plane) + 1 :]
            if self.receiver is not None:
                self._old_receivers.append(self.receiver)  # other pulls may be reading through it right now
                self.receiver = None
            await self._choose_plane()

    async def attach(self, ticket: bytes) -> Attached:
        """Takes a ticket over; its lease is kept alive until `release`."""
        attached = await self.client.attach(ticket, RPC_TIMEOUT)
        self._hold(ticket, attached.epoch, attached.lease_seconds)
        return attached

    async def attach_prefix(
        self,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        first_block: int,
        *,
        always: bool = False,
        timeout: float = RPC_TIMEOUT,
    ) -> AttachedPrefix:
        """Gets a ticket over cached blocks; likewise. `always`: the peer's tiers load them whatever that costs."""
        attached = await self.client.attach_prefix(keys, token_ids, first_block, timeout, always=always)
        self._hold(attached.ticket, attached.epoch, attached.lease_seconds)
        return attached

    def _hold(self, ticket: bytes, epoch: int, lease_seconds: float) -> None:
        self.held[ticket] = epoch
        self.lease_seconds = lease_seconds
        self._attached.set()

    async def release(self, ticket: bytes, epoch: int) -> None:
        """Gives a ticket back; if the peer cannot be told, its reaper will see to it."""
        if self.held.get(ticket) == epoch:
            del self.held[ticket]
        try:
            await self.client.release(ticket, epoch, RPC_TIMEOUT)
        except PagewireError as error:
            logger.info("ticket %s was not released at %s: %s", ticket[:4].hex(), self.endpoint, error.message)

    async def heartbeat(self) -> None:
        """One heartbeat for everything held; refused tickets are dropped (their pulls fail by themselves)."""
        held = dict(self.held)
        for ticket in await self.client.heartbeat(list(held.items()), RPC_TIMEOUT):
            if self.held.get(ticket) == held.get(ticket):  # not attached anew meanwhile
                self.held.pop(ticket, None)

    async def hold(self) -> None:
        """Shows the peer that this worker lives: it keeps our tickets for a second after the connection broke."""
        pause = _FIRST_HOLD_PAUSE
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            with suppress(PagewireError):
                await self.client.hold()
            pause = _FIRST_HOLD_PAUSE if loop.time() - began > _LAST_HOLD_PAUSE else min(2 * pause, _LAST_HOLD_PAUSE)
            await asyncio.sleep(pause)

    async def rest(self) -> None:
        """Until the next heartbeat is due; an idle peer that gets something to hold is due sooner."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while (left := start + self._heartbeat_seconds - loop.time()) > 0:
            self._attached.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._attached.wait()

    @property
    def _heartbeat_seconds(self) -> float:
        return min(self.lease_seconds / 3, _BUSY_HEARTBEAT) if self.held else _IDLE_HEARTBEAT

    async def close(self) -> None:
        """Ends every RPC to the peer and lets go of its memory."""
        await self._channel.close()
        for receiver in (self.receiver, *self._old_receivers):
            if receiver is not None:
                receiver.close()
        self.receiver = None
        self._old_receivers.clear()

    async def _choose_plane(self) -> None:
        if self._pool is None:
            raise FailedPrecondition(f"{self.endpoint}: no handshake")
        size = self._me.fingerprint.block_bytes[0]
        try:
            self.receiver = await self._in_thread(open_receiver, self._planes, self._pool, size, self._means)
        except PlaneUnavailable as error:
            raise Unavailable(f"no KV transfer from {self.endpoint}: {error}") from None
        self.plane = Plane.GRPC if self.receiver is None else self.receiver.plane
        self._planes = self._planes[self._planes.index(self.plane) :]
