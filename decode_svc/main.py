"""`pagewire decode`: runs one decode worker until SIGTERM."""

import logging

from decode_svc.app import DecodeApp
from engine.engine import Engine
from engine.worker_setup import check_before_loading, load_engine
from pagewire import event_loop
from pagewire.config import WorkerConfig
from pagewire.free_memory import keep_free_memory
from pagewire.worker_process import start_metrics

logger = logging.getLogger(__name__)


def run(config: WorkerConfig) -> int:
    """Loads, serves, drains; returns the exit code. Raises what a bad model, port or URL raises."""
    check_before_loading(config)
    engine = load_engine(config.engine)
    keep_free_memory()
    try:
        event_loop.run(_serve(config, engine))
    finally:
        engine.close()
    return 0


async def _serve(config: WorkerConfig, engine: Engine) -> None:
    app = DecodeApp(config, engine)
    metrics = start_metrics(config, app.registry)
    try:
        await app.start()
        await app.server.serve(app.worker, close_sessions=app.close_streams)
    finally:
        await app.stop()
        if metrics is not None:
            metrics.close()
