"""Who is there: the workers that Redis or the configuration names, whether each is alive, how busy, its channel."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from kvstore.index import PrefixIndex
from pagewire import rpc
from pagewire.worker_view import LoadSnapshot, WorkerDescription, WorkerRole
from router.worker_link import WorkerLink

logger = logging.getLogger(__name__)

# (worker id, old incarnation, new incarnation)
IncarnationListener = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """One worker now. `channel` is shared by all requests and stays the same as long as the address is watched."""

    description: WorkerDescription
    load: LoadSnapshot
    alive: bool
    channel: grpc.aio.Channel

    @property
    def is_available(self) -> bool:
        return self.alive and not self.load.draining


class Fleet:
    """Watches addresses: the fixed ones, and those in the registry as the index's view has it.

    Alive is who talks: a WatchWorker stream that breaks or is silent for `silence_seconds` ends a worker's life,
    whatever Redis says; without Redis the fixed addresses are enough. An address is forgotten when neither names it
    any more and nobody has answered there for `forget_seconds`.
    """

    def __init__(
        self,
        addresses: Iterable[str] = (),
        index: PrefixIndex | None = None,
        *,
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
        silence_seconds: float = 5.0,
        forget_seconds: float = 15.0,
        on_new_incarnation: IncarnationListener | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._fixed = frozenset(addresses)
        self._index = index
        self._connect = connect
        self._silence_seconds = silence_seconds
        self._forget_seconds = forget_seconds
        self.on_new_incarnation = on_new_incarnation
        self.on_change = on_change
        self._links: dict[str, WorkerLink] = {}
        self._by_worker: dict[str, WorkerLink] = {}
        self._workers: Mapping[str, FleetWorker] | None = None  # None: something has changed
        self._spare_channels: dict[str, tuple[grpc.aio.Channel, float]] = {}  # with the time of their last use
        self._incarnations: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._running = False

    async def start(self) -> None:
        """Begins to watch; returns at once. The index is started by whoever made it."""
        self._running = True
        self.refresh()

    async def stop(self) -> None:
        """Ends all watches and closes all channels."""
        self._running = False
        links, self._links = list(self._links.values()), {}
        self._by_worker.clear()
        self._workers = None
        spare, self._spare_channels = [channel for channel, _ in self._spare_channels.values()], {}
        await asyncio.gather(*(link.stop() for link in links), *self._closing, *(each.close() for each in spare))

    def refresh(self) -> None:
        """Looks at the registry again; the index's `on_change` calls it."""
        if not self._running:
            return
        named = self._named_addresses()
        for address in named - self._links.keys():
            self._links[address] = WorkerLink(
                address, self._connect(address), self._link_changed, silence_seconds=self._silence_seconds
            )
        oldest = asyncio.get_running_loop().time() - self._forget_seconds
        for address, link in list(self._links.items()):
            if address not in named and not link.alive and link.dead_since <= oldest:
                del self._links[address]
                self._close(link.stop(), address)
        for address, (channel, used_at) in list(self._spare_channels.items()):
            if used_at <= oldest:
                del self._spare_channels[address]
                self._close(channel.close(), address)
        self._sort_out()
        self._changed.set()

    def _close(self, closing: Coroutine[Any, Any, None], address: str) -> None:
        task = asyncio.create_task(closing, name=f"close {address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _named_addresses(self) -> frozenset[str]:
        records = self._index.workers().values() if self._index is not None else ()
        return self._fixed | {record.endpoint for record in records}

    def _link_changed(self, link: WorkerLink) -> None:
        self._workers = None
        if not self._running:
            return
        description = link.description
        if description is not None and link.alive:
            known = self._incarnations.get(description.worker_id)
            self._incarnations[description.worker_id] = description.incarnation
            if known is not None and known != description.incarnation:
                logger.info("worker %s has a new incarnation", description.worker_id)
                if self.on_new_incarnation is not None:
                    self.on_new_incarnation(description.worker_id, known, description.incarnation)
        self.refresh()
        if self.on_change is not None:
            self.on_change()

    def _sort_out(self) -> None:
        """One link per worker id: two addresses may lead to one process, and a moved worker leaves a dead address."""
        best: dict[str, WorkerLink] = {}
        for link in self._links.values():
            if link.description is None:
                continue
            rival = best.get(link.description.worker_id)
            if rival is None or self._rank(link) > self._rank(rival):
                best[link.description.worker_id] = link
        self._by_worker, self._workers = best, None
        for worker_id in self._incarnations.keys() - best.keys():
            del self._incarnations[worker_id]

    def _rank(self, link: WorkerLink) -> tuple[bool, bool]:
        description = link.description
        assert description is not None
        record = self._index.workers().get(description.worker_id) if self._index is not None else None
        return link.alive, record is not None and record.incarnation == description.incarnation

    # --- what requests ask ---

    def workers(self) -> Mapping[str, FleetWorker]:
        """Every worker that was ever seen at a watched address, by worker id: the same object until one changes."""
        if self._workers is None:
            self._workers = {
                worker_id: FleetWorker(link.description, link.load, link.alive, link.channel)
                for worker_id, link in self._by_worker.items()
                if link.description is not None
            }
        return self._workers

    def processes(self) -> list[tuple[str, int]]:
        """(worker id, incarnation) of every worker."""
        return [(worker_id, worker.description.incarnation) for worker_id, worker in self.workers().items()]

    def find(self, worker_id: str, incarnation: int) -> FleetWorker | None:
        """This very process, dead or alive; None if another one has its place or nobody."""
        link = self._by_worker.get(worker_id)
        if link is None or link.description is None or link.description.incarnation != incarnation:
            return None
        return FleetWorker(link.description, link.load, link.alive, link.channel)

    def channel(self, worker_id: str, endpoint: str) -> grpc.aio.Channel:
        """The worker's channel. If nobody is watched there any more, one that will find out."""
        link = self._by_worker.get(worker_id) or self._links.get(endpoint)
        if link is not None:
            return link.channel
        spare = self._spare_channels.get(endpoint)
        channel = self._connect(endpoint) if spare is None else spare[0]
        self._spare_channels[endpoint] = channel, asyncio.get_running_loop().time()
        return channel

    async def wait_ready(self, roles: Collection[WorkerRole], timeout: float = 30.0) -> None:
        """Returns when each role has a worker that can take work; TimeoutError names the roles that have none."""
        try:
            async with asyncio.timeout(timeout):
                while missing := self._missing(roles):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"no {' and no '.join(missing)} worker after {timeout:g} s") from None

    def _missing(self, roles: Collection[WorkerRole]) -> list[WorkerRole]:
        present = {worker.description.role for worker in self.workers().values() if worker.is_available}
        return [role for role in roles if role not in present]
