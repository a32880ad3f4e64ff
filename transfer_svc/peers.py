"""The workers this one has pulled from: a peer for each of their incarnations, while somebody needs it."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence

import grpc

from engine.transfer.nixl_agent import NixlAgent
from engine.transfer.plane import Plane
from pagewire.errors import PagewireError
from pagewire.worker_view import WorkerDescription
from transfer_svc.peer import InThread, Peer

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
# Before each attempt to give a ticket back to a worker that could not be reached.
_GIVE_BACK_PAUSES = (0.0, 0.2, 0.4, 0.8)


class PeerTable:
    """Peers by endpoint and incarnation. A peer without users is closed when it is silent, replaced, or long idle.

    `tls`: what the plane TCP dials with.
    """

    def __init__(
        self,
        me: WorkerDescription,
        wanted: Sequence[Plane],
        in_thread: InThread,
        open_channel: Callable[[str], grpc.aio.Channel],
        agent: NixlAgent | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._me = me
        self._agent = agent
        self._tls = tls
        self._wanted = tuple(wanted)
        self._in_thread = in_thread
        self._open_channel = open_channel
        self._peers: dict[tuple[str, int], asyncio.Task[Peer]] = {}
        self._keepers: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._peers)

    def connected(self) -> list[Peer]:
        """Peers whose handshake succeeded."""
        tasks = [task for task in self._peers.values() if task.done() and not task.cancelled()]
        return [task.result() for task in tasks if task.exception() is None]

    async def get(self, endpoint: str, incarnation: int) -> Peer:
        """The connected peer, with one user more; the caller ends with `put_back`. Raises PagewireError."""
        key = (endpoint, incarnation)
        connecting = self._peers.get(key)
        if connecting is None:
            self._retire_others(key)
            connecting = asyncio.create_task(self._connect(key), name=f"peer-{endpoint}")
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._peers[key] = connecting
        peer = await asyncio.shield(connecting)
        peer.num_users += 1
        return peer

    def put_back(self, peer: Peer) -> None:
        """One user less."""
        peer.num_users -= 1

    async def give_back(self, endpoint: str, incarnation: int, ticket: bytes) -> None:
        """Ends a ticket whose KV nobody needs; if its owner stays out of reach, the lease does."""
        error: PagewireError | None = None
        for pause in _GIVE_BACK_PAUSES:
            await asyncio.sleep(pause)
            try:
                peer = await self.get(endpoint, incarnation)
                try:
                    attached = await peer.attach(ticket)
                    await peer.release(ticket, attached.epoch)
                finally:
                    self.put_back(peer)
                return
            except PagewireError as failure:
                error = failure
                if failure.code is not grpc.StatusCode.UNAVAILABLE:
                    break
        if error is not None and error.code is not grpc.StatusCode.NOT_FOUND:
            logger.info("ticket %s of %s is left to its lease: %s", ticket[:4].hex(), endpoint, error.message)

    async def stop(self) -> None:
        """Closes all peers."""
        connecting = list(self._peers.values())
        for task in (*connecting, *self._keepers):
            task.cancel()
        await asyncio.gather(*connecting, *self._keepers, return_exceptions=True)

    async def _connect(self, key: tuple[str, int]) -> Peer:
        endpoint, incarnation = key
        peer = Peer(endpoint, self._open_channel(endpoint), self._me, self._in_thread, self._agent, self._tls)
        try:
            await peer.connect(incarnation, self._wanted)
        except BaseException:
            self._peers.pop(key, None)
            await peer.close()
            raise
        keeper = asyncio.create_task(self._keep(key, peer), name=f"peer-heartbeat-{endpoint}")
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        return peer

    async def _keep(self, key: tuple[str, int], peer: Peer) -> None:
        """Heartbeats until nobody needs the peer any more or it is gone."""
        clock = asyncio.get_running_loop().time
        used_at = clock()
        holding = asyncio.create_task(peer.hold(), name=f"peer-hold-{peer.endpoint}")
        try:
            while clock() - used_at < IDLE_SECONDS and not (peer.is_retired and not peer.num_users):
                await peer.rest()
                if peer.num_users or peer.held:
                    used_at = clock()
                try:
                    await peer.heartbeat()
                except PagewireError as error:
                    logger.warning("no heartbeat from %s: %s", peer.endpoint, error.message)
                    self._forget(key, peer)  # whoever comes next connects anew
                    peer.give_up(hangs=error.code is grpc.StatusCode.DEADLINE_EXCEEDED)
        finally:
            self._forget(key, peer)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await peer.close()

    def _retire_others(self, key: tuple[str, int]) -> None:
        """Another incarnation at the same endpoint means that the older one is gone."""
        for (endpoint, incarnation), task in list(self._peers.items()):
            if endpoint == key[0] and incarnation != key[1] and task.done() and not task.cancelled():
                self._forget((endpoint, incarnation), task.result())

    def _forget(self, key: tuple[str, int], peer: Peer) -> None:
        """New users get another peer; this one closes with its last user."""
        peer.is_retired = True
        task = self._peers.get(key)
        if task is not None and task.done() and not task.cancelled() and task.result() is peer:
            del self._peers[key]
