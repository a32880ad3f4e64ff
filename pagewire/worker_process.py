"""A worker as an operating-system process: ports, services, health, metrics, the ready line, the drain."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry

from pagewire import rpc
from pagewire.config import WorkerConfig
from pagewire.health import HealthServicer
from pagewire.metrics import MetricsServer, RpcMetrics
from pagewire.prefix_control import PrefixControl
from pagewire.security import Security
from pagewire.tracing import make_tracer
from pagewire.v1 import admin_pb2_grpc, worker_pb2_grpc
from pagewire.worker_rpc import SERVICE_NAMES, WorkerAdminServicer, WorkerServicer
from pagewire.worker_view import WorkerView

logger = logging.getLogger(__name__)

_DRAIN_POLL = 0.05


class WorkerDied(RuntimeError):
    """The worker lost what it cannot serve without; the process must exit."""


class Worker(WorkerView, Protocol):
    """What a role brings along."""

    @property
    def has_work(self) -> bool:
        """Something still runs, or may still be read by a peer."""
        ...


class WorkerServer:
    """The gRPC server of one worker: made and bound first, since the worker's description needs the port."""

    def __init__(self, config: WorkerConfig, registry: CollectorRegistry) -> None:
        self._config = config
        self._security = Security.from_config(config)
        self._rpc_metrics = RpcMetrics(registry)
        self.tracer = make_tracer(config.otlp_traces_endpoint, config.role, config.worker_id or "")
        self.server = rpc.build_server(security=self._security, observe=self._rpc_metrics.observe)
        self.port = rpc.bind(self.server, config.host, config.port, self._security)
        self.endpoint = config.endpoint(self.port)
        self.health: HealthServicer | None = None
        self._closing: list[Callable[[], None]] = []
        self._death: Future[None] = Future()

    def die_with(self, death: Future[None]) -> None:
        """`serve` ends at once, NOT_SERVING, and raises WorkerDied when `death` gets an exception."""
        self._death = death

    def close_with(self, close: Callable[[], None]) -> None:
        """`close` ends the endless streams of a service; called once nothing runs any more, or at the end."""
        self._closing.append(close)

    def open_channel(self, target: str) -> grpc.aio.Channel:
        """A channel to another worker with this one's credentials."""
        return rpc.channel(target, security=self._security)

    def add_services(self, worker: Worker, prefixes: PrefixControl, service_names: Iterable[str]) -> None:
        """Adds what every worker has; `service_names` are the role's own, added by the caller."""
        watches = WorkerServicer(worker)
        self.close_with(watches.close)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(watches, self.server)
        self.health = rpc.add_health_and_reflection(self.server, (*service_names, *SERVICE_NAMES))
        admin = WorkerAdminServicer(worker, prefixes, on_drain=lambda: self._set_not_serving())
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self.server)

    def _set_not_serving(self) -> None:
        if self.health is not None:
            self.health.set_all(serving=False)

    async def close(self) -> None:
        """Ends what still runs, and sends the last spans."""
        await self.server.stop(None)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def serve(self, worker: Worker, *, close_sessions: Callable[[], None] = lambda: None) -> None:
        """Until SIGTERM or SIGINT; then what runs is finished and peers finish their pulls, within `drain_timeout`."""
        assert self.health is not None

        async def drain() -> None:
            worker.start_drain()
            while worker.has_work:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DRAIN_POLL):
                        await worker.wait_for_change()
            close_sessions()
            self._close_streams()

        try:
            await rpc.serve(
                self.server,
                self.health,
                ready=lambda: print(rpc.ready_line(worker.description.role, self.endpoint), flush=True),
                drain=drain,
                drain_timeout=self._config.drain_timeout,
                death=asyncio.wrap_future(self._death),
            )
        except Exception as error:
            if not self._death.done():
                raise
            logger.critical("this worker cannot go on and exits: %s: %s", type(error).__name__, error)
            raise WorkerDied(f"the engine has died: {type(error).__name__}: {error}") from error
        finally:
            self._close_streams()

    def _close_streams(self) -> None:
        for close in self._closing:
            close()


def start_metrics(config: WorkerConfig, registry: CollectorRegistry) -> MetricsServer | None:
    """Serves the registry if the configuration asks for it."""
    if config.metrics_port is None:
        return None
    server = MetricsServer(registry, config.metrics_port, config.host)
    logger.info("metrics at http://%s:%d/metrics", config.host, server.port)
    return server
