"""What both workers' processes are put together from: server, description, publisher, and the services they share."""

import time
from abc import ABC
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from engine.engine import Engine
from engine.transfer.negotiate import wanted_planes
from engine.transfer.plane import is_host_visible
from engine.transfer.tcp_wire import TcpSettings
from engine.worker_setup import describe_worker, make_publisher
from pagewire.config import WorkerConfig
from pagewire.fetch_metrics import FetchMetrics
from pagewire.foreign.smg import vllm_engine_pb2_grpc
from pagewire.tls import TlsFiles
from pagewire.vllm_engine import SERVICE_NAME as VLLM_ENGINE
from pagewire.vllm_engine.model_card import ModelCard
from pagewire.vllm_engine.worker_facade import WorkerVllmEngine
from pagewire.worker_metrics import WorkerMetrics
from pagewire.worker_process import WorkerServer
from transfer_svc.fetch_offers import FetchSettings
from transfer_svc.service import SERVICE_NAME as TRANSFER_SERVICE
from transfer_svc.service import KvTransferServicer, add_to_server
from transfer_svc.worker import KvWorker, WorkerLimits, WorkerSetup


class WorkerApp(ABC):
    """A bound server and its worker. `start` begins to work, the server is started by whoever serves it.

    A subclass makes `worker` of `setup`, adds its own service, and calls `_add_services`.
    """

    worker: KvWorker

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        *,
        pool_wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        self._is_stopped = False
        self.server = WorkerServer(config, self.registry)
        self.server.die_with(engine.death)
        self.description = describe_worker(engine, config, self.server.endpoint)
        self._publisher = make_publisher(config.redis_url, self.description, engine) if config.redis_url else None
        self.card = ModelCard(Path(engine.options.model), self.description.model)
        self.setup = WorkerSetup(
            description=self.description,
            limits=WorkerLimits(
                lease_seconds=config.kv_lease_seconds,
                max_hold_seconds=config.kv_max_hold_seconds,
                max_queued_requests=config.max_queued_requests,
                max_queued_tokens=config.max_queued_tokens,
                pool_wait_seconds=pool_wait_seconds,
            ),
            metrics=WorkerMetrics(self.registry, self.description.model),
            fetch_metrics=FetchMetrics(self.registry, self.description.model),
            fetch=FetchSettings(config.kv_fetch, config.kv_fetch_min_tokens),
            planes=wanted_planes(config.kv_transfer, in_device_memory=not is_host_visible(engine.memory)),
            open_channel=self.server.open_channel,
            tcp=_tcp_settings(config),
            clock=clock,
        )

    def _add_services(self, vllm_engine: WorkerVllmEngine, own_service: str) -> None:
        """What both workers serve; `own_service` was added by the subclass."""
        worker = self.worker
        self.transfers = KvTransferServicer(
            worker.sender,
            worker.lender,
            worker.pool_server,
            self.description,
            self.setup.planes,
            worker.staging,
        )
        add_to_server(self.transfers, self.server.server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm_engine, self.server.server)
        self.server.close_with(vllm_engine.close)
        self.server.add_services(worker, worker.prefixes, (own_service, TRANSFER_SERVICE, VLLM_ENGINE))

    async def start(self) -> None:
        await self.worker.start(self._publisher)

    async def stop(self) -> None:
        """Ends everything at once, whatever still runs. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self.server.server.stop(None)
        await self.worker.stop()
        await self.server.close()


def _tcp_settings(config: WorkerConfig) -> TcpSettings:
    """The plane TCP speaks TLS where gRPC does."""
    files = TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)
    server_tls = files.watch_context("KV transfers") if config.tls_cert is not None else None
    dials_tls = config.tls_cert is not None or config.tls_ca is not None
    return TcpSettings(config.host, config.kv_transfer_port, server_tls, files.client_context if dials_tls else None)
