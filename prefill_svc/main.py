"""`pagewire prefill`: runs one prefill worker until SIGTERM."""

import logging

from engine.engine import Engine
from engine.worker_setup import check_before_loading, load_engine
from pagewire import event_loop
from pagewire.config import EngineOptions, WorkerConfig
from pagewire.free_memory import keep_free_memory
from pagewire.worker_process import start_metrics
from prefill_svc.app import PrefillApp

logger = logging.getLogger(__name__)


def run(config: WorkerConfig) -> int:
    """Loads, serves, drains; returns the exit code. Raises what a bad model, port or URL raises."""
    check_before_loading(config)
    engine = load_engine(engine_options(config))
    keep_free_memory()
    try:
        event_loop.run(_serve(config, engine))
    finally:
        engine.close()
    return 0


def engine_options(config: WorkerConfig) -> EngineOptions:
    """What a prefill worker needs of the engine's options: it decodes nothing, so it loads no draft model."""
    if config.engine.speculative_config is not None:
        logger.info("speculative_config is for decode workers; a prefill worker does without")
    return config.engine.model_copy(update={"speculative_config": None})


async def _serve(config: WorkerConfig, engine: Engine) -> None:
    app = PrefillApp(config, engine)
    metrics = start_metrics(config, app.registry)
    try:
        await app.start()
        await app.server.serve(app.worker, close_sessions=app.transfers.close)
    finally:
        await app.stop()
        if metrics is not None:
            metrics.close()
