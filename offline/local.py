"""The router's pipeline over an engine in this process: no network, no Redis, no other process."""

from collections.abc import Set
from pathlib import Path
from typing import NoReturn

from prometheus_client import CollectorRegistry

from engine.engine import Engine
from engine.host import EngineHost
from offline.engine_life import EngineLives
from pagewire.config import EngineOptions
from pagewire.text.tokenizer import Tokenizer
from pagewire.worker_metrics import WorkerMetrics
from pagewire.worker_view import AdapterLabel
from router.model import ModelFacts
from router.pipeline import Pipeline
from router.placement import Demand, Limits, Worker
from router.prompt_keys import KeySpace

# Nobody waits for an answer with a deadline of their own, and a batch may run for days.
_REQUEST_SECONDS = 10 * 365 * 86400.0
_MOST_REQUESTS = 1 << 30


class LocalBackend(Pipeline):
    """Make it anywhere, use it on one event loop: `begin`, then requests, then `end`, which closes the engine too."""

    def __init__(self, engine: Engine, model: ModelFacts) -> None:
        self._engine_lives = EngineLives()
        super().__init__(
            model,
            _EngineLimits(engine),
            request_timeout=_REQUEST_SECONDS,
            max_concurrent_requests=_MOST_REQUESTS,
            start_life=self._engine_lives.start,
            adapters=lambda: _labels(engine),
        )
        metrics = WorkerMetrics(CollectorRegistry(), model.name)
        self._host = EngineHost(engine, metrics, prepare=lambda step: None, on_step=self._engine_lives.on_step)
        # Enough waits in the engine that its batch is full whenever a request ends.
        self.num_in_flight = max(64, 4 * engine.max_num_seqs)

    @classmethod
    def load(cls, options: EngineOptions) -> "LocalBackend":
        """Loads the model that `options` name, a directory. Raises EngineError or ModelError."""
        from engine.worker_setup import load_engine

        model = ModelFacts.load(Path(options.model), options.served_model_name)
        return cls(load_engine(options), model)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.model.tokenizer

    async def begin(self) -> None:
        """Starts the device thread."""
        await self._host.start()
        self._engine_lives.host = self._host

    async def end(self) -> None:
        """Fails what still runs, ends all threads and gives the memory back."""
        self._engine_lives.host = None
        await self._host.stop_engine()
        await self._host.stop()
        await self._engine_lives.all_gone()
        await self.close()
        self._host.engine.close()


def _labels(engine: Engine) -> dict[str, AdapterLabel]:
    loaded = () if engine.adapters is None else engine.adapters.loaded()
    return {each.id.name: AdapterLabel(each.id.name, each.id.digest, each.id.generation) for each in loaded}


class _EngineLimits:
    """A placer that knows the one engine's limits; with lives of its own, the pipeline asks it nothing else."""

    def __init__(self, engine: Engine) -> None:
        block_size = engine.kv_cache.block_size
        self._limits = Limits(engine.max_model_len, engine.kv_cache.capacity * block_size, block_size)

    def limits(self) -> Limits:
        return self._limits

    def key_spaces(self) -> list[KeySpace]:
        return []

    def explain(self, demand: Demand, open_breakers: Set[tuple[str, int]] = frozenset()) -> NoReturn:
        raise NotImplementedError("there is one engine, nothing to choose")

    def is_alive(self, worker: Worker) -> bool:
        return True

    def place(self, demand: Demand, avoid: Set[tuple[str, int]] = frozenset()) -> NoReturn:
        raise NotImplementedError("requests run on the engine of this process")

    def channel(self, worker: Worker) -> NoReturn:
        raise NotImplementedError("requests run on the engine of this process")
