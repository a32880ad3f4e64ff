"""Puts a prefill worker together: engine, worker, services, publisher."""

import time
from collections.abc import Callable
from functools import partial

from engine.engine import Engine
from pagewire.config import WorkerConfig
from pagewire.v1 import prefill_pb2_grpc
from prefill_svc.service import PrefillServicer
from prefill_svc.tracing import TracedPrefillServicer, TracedPrefillWorker
from prefill_svc.vllm_engine import PrefillVllmEngine
from prefill_svc.worker import PrefillWorker
from transfer_svc.app import WorkerApp

PREFILL_SERVICE = "pagewire.v1.PrefillService"
# A prefill that finds no room for what it would fetch computes it.
POOL_WAIT_SECONDS = 0.0


class PrefillApp(WorkerApp):
    """With PrefillService."""

    worker: PrefillWorker

    def __init__(self, config: WorkerConfig, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, engine, pool_wait_seconds=POOL_WAIT_SECONDS, clock=clock)
        tracer = self.server.tracer
        make = PrefillWorker if tracer is None else partial(TracedPrefillWorker, tracer=tracer)
        self.worker = make(engine, self.setup)
        servicer = (
            TracedPrefillServicer(self.worker)
            if isinstance(self.worker, TracedPrefillWorker)
            else PrefillServicer(self.worker)
        )
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, self.server.server)
        self._add_services(PrefillVllmEngine(self.worker, engine.kv_cache, self.card), PREFILL_SERVICE)
