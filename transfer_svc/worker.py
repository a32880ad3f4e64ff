"""What a prefill and a decode worker share: an engine, a queue before it, and a part in every KV transfer.

    engine ── host ── queue of requests                          (a subclass has the requests themselves)
                └─── leases ── sender ── lender                  others read what is here
                └─── peers ── reservations ── fetcher            this worker reads what others have

It knows neither of the two: they derive from it.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import grpc

from engine.engine import Engine
from engine.errors import RequestRefused
from engine.host import EngineHost, SequencedPublisher
from engine.transfer.negotiate import start_agent
from engine.transfer.plane import Plane, is_host_visible
from engine.transfer.pool_server import PoolServer
from engine.transfer.tcp_server import TcpServer
from engine.transfer.tcp_wire import TcpSettings
from kvstore.block_store import StoreError
from pagewire.admission_queue import AdmissionQueue
from pagewire.errors import InvalidArgument
from pagewire.fetch_metrics import FetchMetrics
from pagewire.worker_metrics import WorkerMetrics
from pagewire.worker_view import AdapterView, LoadSnapshot, StatusSnapshot, WorkerDescription
from transfer_svc.adapters import WorkerAdapters
from transfer_svc.fetch import PrefixFetcher
from transfer_svc.fetch_offers import FetchSettings
from transfer_svc.leases import Expired, LeaseTable
from transfer_svc.lender import Lender
from transfer_svc.on_host import Staging
from transfer_svc.peers import PeerTable
from transfer_svc.prefix_control import WorkerPrefixes, not_erased
from transfer_svc.reservations import Reservations
from transfer_svc.sender import KvSender

REAP_PERIOD = 0.25


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The worker's own limits; the engine has its own. `pool_wait_seconds`: how long a transfer waits for a block."""

    lease_seconds: float
    max_hold_seconds: float
    max_queued_requests: int
    max_queued_tokens: int
    pool_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker is given beside its engine. `clock`: monotonic seconds; `random_bytes` must be unpredictable."""

    description: WorkerDescription
    limits: WorkerLimits
    metrics: WorkerMetrics
    fetch_metrics: FetchMetrics
    fetch: FetchSettings
    planes: Sequence[Plane]
    open_channel: Callable[[str], grpc.aio.Channel]
    tcp: TcpSettings
    clock: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = secrets.token_bytes


class KvWorker(ABC):
    """Everything happens on one event loop."""

    def __init__(self, engine: Engine, setup: WorkerSetup, host: EngineHost[Any]) -> None:
        limits, fetch_metrics = setup.limits, setup.fetch_metrics
        self.description = setup.description
        self.metrics = setup.metrics
        self._clock = setup.clock
        self._host = host
        self._queue = AdmissionQueue(limits.max_queued_requests, limits.max_queued_tokens)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_transfers = 0
        self._reaper: asyncio.Task[None] | None = None
        self.leases = LeaseTable(limits.lease_seconds, limits.max_hold_seconds, setup.random_bytes)
        self.sender = KvSender(self.leases, engine.kv_cache, setup.clock, host.announce)
        agent = start_agent(setup.planes, f"{setup.description.worker_id}/{setup.description.incarnation:x}")
        staging = None if is_host_visible(engine.memory) else engine.memory.io
        tcp = TcpServer(engine.memory, setup.tcp, staging) if Plane.TCP in setup.planes else None
        self.pool_server = PoolServer(engine.memory, agent, tcp)
        self.peers = PeerTable(
            setup.description,
            setup.planes,
            host.in_peer_thread,
            setup.open_channel,
            self.pool_server.agent,
            setup.tcp.client_tls,
        )
        self.adapters = WorkerAdapters(host)
        self.reservations = Reservations(
            engine.kv_cache, host.wait_for_change, self._num_growing_blocks, limits.pool_wait_seconds
        )
        self.lender = Lender(
            host,
            self.leases,
            self.sender,
            setup.clock,
            self._num_lacking_blocks,
            lambda: self.reservations.num_spare,
            fetch_metrics,
        )
        self.fetcher = PrefixFetcher(
            host,
            self.peers,
            self.reservations,
            setup.fetch,
            setup.metrics,
            fetch_metrics,
            self._num_lacking_blocks,
            self._spawn,
        )
        self.prefixes = WorkerPrefixes(host, self.fetcher, self.reservations)

    @property
    def staging(self) -> Staging:
        """For a pool in device memory. Copies may wait for a step, which the threads of short work must not."""
        return Staging(self._host.memory.io, self._host.in_peer_thread)

    # --- what a role brings along ---

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests that have not ended."""

    @abstractmethod
    def _give_up(self) -> None:
        """The worker stops: tells all requests so and cancels them."""

    async def _engine_stopped(self) -> None:  # noqa: B027 (most have nothing to do)
        """Ends what may only end when no step will come any more."""

    # --- from start to stop ---

    async def start(self, publisher: SequencedPublisher | None = None) -> None:
        await self._host.start(publisher)
        self.pool_server.start()
        self._reaper = self._host.supervise(self._reap_forever(), "lease-reaper")

    async def stop(self) -> None:
        """Gives up everything that is left."""
        self.prefixes.unpin_all()
        self._give_up()
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.stop()
        await self._host.stop_engine()
        await self._engine_stopped()
        await self.lender.stop()
        self.sender.drop_all("the worker stopped")
        await self.pool_server.close()
        await self._host.stop()

    def start_drain(self) -> None:
        self._queue.draining = True
        self.lender.draining = True
        self._host.announce()

    async def quiesce(self) -> None:
        """Returns when the index has everything that has happened so far."""
        await self._host.quiesce()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Keeps a task from being collected; `stop` waits for it."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- leases ---

    async def _reap_forever(self) -> None:
        period = min(REAP_PERIOD, self.leases.lease_seconds / 4)
        while True:
            await asyncio.sleep(period)
            self.reap()

    def reap(self) -> None:
        """Visits every lease once."""
        for expired in self.sender.reap(under_pressure=self._is_under_pressure()):
            self._count_end(expired)
        self.lender.relieve()
        self.metrics.num_tickets.set(len(self.leases))
        self.metrics.num_held_blocks.set(self.leases.num_held_blocks)

    def _is_under_pressure(self) -> bool:
        """Tickets that nobody reads are then ended before their time."""
        return False

    def _count_end(self, expired: Expired) -> None:
        metrics = self.metrics
        if expired.deserted:
            metrics.leases_deserted.inc()
        else:
            (metrics.leases_revoked if expired.revoked else metrics.leases_expired).inc()

    def _num_lacking_blocks(self) -> int:
        """Blocks that waiting and running requests need at most, less those that are free."""
        cache = self._host.kv_cache
        waiting = cache.groups.num_pool_blocks(self._queue.num_tokens, len(self._queue))
        return waiting + self._num_growing_blocks() - cache.num_free

    def _num_growing_blocks(self) -> int:
        """Blocks that the running sequences may take in a step: one in each KV group."""
        return self._host.load.num_running * len(self._host.kv_cache.groups)

    # --- what others may know ---

    @property
    def has_work(self) -> bool:
        """Requests that run, tickets that somebody may still read, and what is still being cleaned up."""
        return bool(self.num_requests or self._tasks) or len(self.leases) > 0

    def load(self) -> LoadSnapshot:
        load = self._host.load
        return LoadSnapshot(
            num_running=load.num_running,
            num_waiting=max(load.num_waiting, len(self._queue)),
            num_queued_tokens=load.num_tokens_to_compute + self._queue.num_tokens_to_compute,
            num_free_blocks=self._host.kv_cache.free_capacity,
            num_held_blocks=self._host.kv_cache.share_of_capacity(self.leases.num_held_blocks),
            draining=self._queue.draining,
            adapters=self.adapters.views(),
            num_transfers=self._num_transfers,
        )

    def status(self) -> StatusSnapshot:
        stats = self._host.kv_cache.stats()
        return StatusSnapshot(
            num_cached_blocks=stats.num_cached,
            num_referenced_blocks=stats.num_referenced,
            num_requests=self.num_requests,
            tickets=self.sender.snapshot(),
            queues=self._queue.by_tenant(),
        )

    def router_presence(self, router_id: str) -> AbstractContextManager[None]:
        return self.sender.router_presence(router_id)

    async def wait_for_change(self) -> None:
        await self._host.wait_for_change()

    async def reset_prefix_cache(self) -> int:
        self.prefixes.unpin_all()
        try:
            return await self._host.reset_prefix_cache()
        except StoreError as error:
            raise not_erased(error) from None

    async def load_adapter(
        self, name: str, path: str, generation: int, *, check_only: bool, digest: bytes
    ) -> AdapterView:
        return await self.adapters.load(name, path, generation, check_only=check_only, digest=digest)

    def unload_adapter(self, name: str, generation: int) -> bool:
        return self.adapters.unload(name, generation)

    def cached_keys(self) -> tuple[list[bytes], int]:
        return self._host.cached_keys()


def refused(error: RequestRefused) -> InvalidArgument:
    """The engine's refusal as callers get it."""
    return InvalidArgument(f"request.{error.field}", None if error.value == "" else error.value, error.description)
