"""What both workers do at start: name themselves, load the engine with visible progress, prepare the publisher."""

import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.engine import Engine
from engine.transfer.negotiate import wanted_planes
from engine.transfer.plane import Plane
from kvstore.events import Tier
from kvstore.redis_connection import RedisTarget, RedisUrlError
from kvstore.redis_publisher import Publisher
from kvstore.registry import ModelRecord, WorkerRecord
from kvstore.tokenizer_digest import tokenizer_digest
from pagewire.config import EngineOptions, WorkerConfig
from pagewire.ports import check_bindable
from pagewire.worker_view import WorkerDescription, WorkerFingerprint

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 2.0


def check_before_loading(config: WorkerConfig) -> None:
    """What can be said to be wrong before a model is loaded. Raises BindError (an OSError) or RedisUrlError."""
    check_bindable(config.host, config.port)
    if Plane.TCP in wanted_planes(config.kv_transfer):
        check_bindable(config.host, config.kv_transfer_port)
    index, store = (
        None if url is None else RedisTarget.parse(url) for url in (config.redis_url, config.engine.kv_store_url)
    )
    if index is not None and store is not None and store.shares_database(index):
        raise RedisUrlError(
            f"kv_store_url = {store} must name another server, or at least another database, than redis_url = {index}"
        )


def load_engine(options: EngineOptions) -> Engine:
    """Loads the model; progress goes to a bar on a terminal, to the log elsewhere. Raises EngineError."""
    started_at = time.monotonic()
    engine = _load_with_bar(options) if sys.stderr.isatty() else Engine(options, progress=_log_progress(started_at))
    logger.info("loaded %s in %.1f s", options.model, time.monotonic() - started_at)
    return engine


def describe_worker(engine: Engine, config: WorkerConfig, endpoint: str) -> WorkerDescription:
    """What is fixed for the life of the worker's process: a new incarnation."""
    limits = engine.scheduler.config
    return WorkerDescription(
        worker_id=config.worker_id or f"{config.role}-{secrets.token_hex(4)}",
        incarnation=secrets.randbits(63) | 1,
        role=config.role,
        endpoint=endpoint,
        model=config.engine.served_model_name or Path(config.engine.model).name,
        fingerprint=WorkerFingerprint(
            root=engine.root,
            layout_id=engine.layout_id,
            numerics_class=engine.numerics_class,
            block_size=engine.kv_cache.block_size,
            block_bytes=(int(engine.memory.buffer.shape[1]),),
        ),
        max_model_len=limits.max_model_len,
        num_blocks=engine.kv_cache.capacity,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=engine.config.vocab_size,
    )


def make_publisher(url: str, worker: WorkerDescription, engine: Engine) -> Publisher:
    """Publishes what the engine's cache holds. Raises RedisUrlError for a URL that cannot be used."""
    fingerprint = worker.fingerprint
    record = WorkerRecord(
        worker_id=worker.worker_id,
        endpoint=worker.endpoint,
        role=worker.role,
        incarnation=worker.incarnation,
        capacity=worker.num_blocks,
        root=fingerprint.root,
        layout_id=fingerprint.layout_id,
        numerics_class=fingerprint.numerics_class,
        block_size=fingerprint.block_size,
        block_bytes=fingerprint.block_bytes,
    )
    model = ModelRecord(
        name=worker.model,
        root=fingerprint.root,
        tokenizer_digest=tokenizer_digest(Path(engine.options.model)),
        max_model_len=worker.max_model_len,
        block_size=fingerprint.block_size,
        vocab_size=worker.vocab_size,
    )
    lower: Callable[[], Mapping[Tier, Sequence[bytes]]] = dict if engine.tiers is None else engine.tiers.snapshot
    return Publisher(url, record, fingerprint.root, engine.kv_cache.snapshot, model=model, lower_snapshot=lower)


def _log_progress(started_at: float) -> Callable[[int, int], None]:
    logged_at = started_at

    def report(done: int, total: int) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at > _LOG_EVERY_SECONDS:
            logged_at = time.monotonic()
            logger.info("loading weights: %d of %d MiB", done >> 20, total >> 20)

    return report


def _load_with_bar(options: EngineOptions) -> Engine:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading weights", total=None)
        return Engine(options, progress=lambda done, total: bars.update(task, completed=done, total=total))
