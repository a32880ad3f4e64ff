"""Puts a decode worker together: engine, worker, services, publisher."""

from functools import partial

from decode_svc.service import DecodeServicer
from decode_svc.tracing import TracedDecodeServicer, TracedDecodeWorker
from decode_svc.vllm_engine import DecodeVllmEngine
from decode_svc.worker import DecodeWorker
from engine.engine import Engine
from pagewire.config import WorkerConfig
from pagewire.v1 import decode_pb2_grpc
from transfer_svc.app import WorkerApp

DECODE_SERVICE = "pagewire.v1.DecodeService"
POOL_WAIT_SECONDS = 20.0


class DecodeApp(WorkerApp):
    """With DecodeService."""

    worker: DecodeWorker

    def __init__(self, config: WorkerConfig, engine: Engine) -> None:
        super().__init__(config, engine, pool_wait_seconds=POOL_WAIT_SECONDS)
        tracer = self.server.tracer
        make = DecodeWorker if tracer is None else partial(TracedDecodeWorker, tracer=tracer)
        self.worker = make(engine, self.setup, fail_without_kv=config.kv_load_failure_policy == "fail")
        self.servicer = (
            TracedDecodeServicer(self.worker)
            if isinstance(self.worker, TracedDecodeWorker)
            else DecodeServicer(self.worker)
        )
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.servicer, self.server.server)
        vllm_engine = DecodeVllmEngine(self.worker, engine.kv_cache, self.card, engine.scheduler.config)
        self._add_services(vllm_engine, DECODE_SERVICE)

    def close_streams(self) -> None:
        """Ends the streams of routers and peers that would not end by themselves; the process is about to stop."""
        self.servicer.close_sessions()
        self.transfers.close()
