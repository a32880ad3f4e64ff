"""An engine inside a worker process: the hop between event loop and device thread, the index, the load.

event loop ── add, abort ──► EngineLoop (device thread)
event loop ◄── one call_soon_threadsafe per step ── prepare(step), on the device thread
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from engine.engine import Engine
from engine.grammar_intake import GrammarIntake
from engine.loop import EngineLoop
from engine.quarantine import Quarantine
from engine.request import EngineLoad, EngineRequest, StepOutput
from engine.threads import run_to_the_end
from engine.tiers.report import TierReport
from kvstore.hashing import index_key
from kvstore.index import IndexPublisher
from kvstore.registry import WorkerRecord
from pagewire.trace import new_error_id
from pagewire.worker_metrics import WorkerMetrics

T = TypeVar("T")
R = TypeVar("R")

_NUM_TRANSFER_THREADS = 4
_NUM_PEER_THREADS = 32  # started when needed; most of them only wait

logger = logging.getLogger(__name__)


class SequencedPublisher(IndexPublisher, Protocol):
    """A publisher that numbers what it publishes."""

    @property
    def record(self) -> WorkerRecord: ...


class EngineHost(Generic[T]):
    """Runs an engine for one event loop; everything but `prepare` happens on that loop.

    `prepare` sees each step on the device thread before anything else can happen to its blocks; what it returns goes
    to `on_step` on the event loop. When either raises, the requests of that step are failed; `prepare` must raise
    before it takes over `held` blocks. A device thread that cannot go on says so in `engine.death`.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        *,
        prepare: Callable[[StepOutput], T],
        on_step: Callable[[StepOutput, T], None],
    ) -> None:
        self.engine = engine
        self.kv_cache = engine.kv_cache
        self.memory = engine.memory
        self._metrics = metrics
        metrics.cache_config(
            block_size=self.kv_cache.block_size,
            num_blocks=self.kv_cache.num_blocks,
            enable_caching=self.kv_cache.enable_caching,
        )
        self._num_preemptions = 0
        self._prepare = prepare
        self._on_step = on_step
        self._engine_loop = EngineLoop(engine, self._deliver)
        self._grammar_intake = GrammarIntake(engine, self._engine_loop)
        self._threads = ThreadPoolExecutor(_NUM_TRANSFER_THREADS, thread_name_prefix="transfer")
        self._peer_threads = ThreadPoolExecutor(_NUM_PEER_THREADS, thread_name_prefix="peer")
        self.quarantine = Quarantine(self.kv_cache, self.announce)
        self._adapter_thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._publisher: SequencedPublisher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_is_due = False
        self._tier_report = TierReport(engine.tiers, metrics)
        self._changed = asyncio.Event()
        self._load = EngineLoad(num_free_blocks=self.kv_cache.num_free, num_blocks=self.kv_cache.num_blocks)

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    @property
    def publisher(self) -> SequencedPublisher | None:
        return self._publisher

    async def start(self, publisher: SequencedPublisher | None = None) -> None:
        """Starts the device thread and, if there is one, the publisher."""
        self._loop = asyncio.get_running_loop()
        self._publisher = publisher
        # What a step evicts is known to routers while the step runs, not after it: until then they promise it.
        self.kv_cache.evicted = self._flush_soon
        if self.engine.tiers is not None:
            self.engine.tiers.tier_changed = self._flush_soon
        self._tier_report.observe()  # a disk may have kept some
        self._engine_loop.start()
        if publisher is not None:
            await publisher.start()

    def supervise(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that the worker cannot do without: should it fail, the process ends instead of limping on."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                logger.critical("task %s cannot go on", name, exc_info=error)
                self.engine.die(error)

        return asyncio.create_task(run(), name=name)

    async def stop_engine(self) -> None:
        """Ends the device thread; what still runs fails. Returns after its last step was handed on."""
        await self._grammar_intake.cancel_all()
        await self.in_thread(self._engine_loop.stop)
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Ends the publisher and the transfer threads, after `stop_engine` and the planes."""
        await self.quarantine.stop()
        self.flush_events()
        if self._publisher is not None:
            await self._publisher.stop()
        await self.in_thread(self._grammar_intake.close)
        await self.in_thread(partial(self._adapter_thread.shutdown, cancel_futures=True))
        self._threads.shutdown(wait=True)
        self._peer_threads.shutdown(wait=True)

    def add(self, request: EngineRequest) -> None:
        """Queues a request; raises RequestRefused. `adopted` blocks are the engine's in either case."""
        if request.params.structured_output is None:
            self._engine_loop.add(request)
        else:
            self._grammar_intake.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request within one step; unknown ids are fine."""
        self._grammar_intake.cancel(request_id)
        self._engine_loop.abort(request_id)

    async def in_thread(
        self, function: Callable[..., R], *arguments: Any, on_cancel: Callable[[], None] | None = None
    ) -> R:
        """Runs `function` on a transfer thread and does not return before it has ended, even when cancelled.

        `on_cancel` may ask it to end early.

        What it reads and writes are KV blocks: they must not be given back under a thread that still runs.
        """
        return await run_to_the_end(self._threads, function, *arguments, on_cancel=on_cancel)

    async def in_adapter_thread(self, function: Callable[[], R]) -> R:
        """As `in_thread`, on the one thread that reads adapters: transfers must not wait for files."""
        return await run_to_the_end(self._adapter_thread, function, on_cancel=None)

    async def in_peer_thread(
        self, function: Callable[..., R], *arguments: Any, on_cancel: Callable[[], None] | None = None
    ) -> R:
        """As `in_thread`, for what may wait for another worker: a frozen one must not stop this one's own work."""
        return await run_to_the_end(self._peer_threads, function, *arguments, on_cancel=on_cancel)

    async def reset_prefix_cache(self) -> int:
        """Forgets all cached blocks that nobody references, in every tier; raises StoreError as `KvTiers.clear`."""
        try:
            return await self.in_thread(self.engine.reset_prefix_cache)
        finally:
            self.flush_events()

    def flush_events(self) -> None:
        """Publishes what changed in the cache. Only ever called on the event loop, so events stay in order."""
        events = self.engine.take_events()
        if events and self._publisher is not None:
            self._publisher.publish(events)
        if any(event.tier != "device" for event in events):  # also what an operator has cleared
            self._tier_report.observe()

    def _flush_soon(self) -> None:
        """On any thread: idle workers publish too. One flush at a time waits for the event loop."""
        if not self._flush_is_due and self._loop is not None:
            self._flush_is_due = True
            with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        self.flush_events()
        self._tier_report.observe()

    def cached_keys(self) -> tuple[list[bytes], int]:
        """Index keys of all cached blocks, and the seq of the last event the publisher wrote."""
        self.flush_events()
        seq = 0 if self._publisher is None else self._publisher.record.seq
        return [index_key(key) for key in self.kv_cache.cached_keys()], seq

    async def quiesce(self) -> None:
        """Returns when the index has everything that has happened so far."""
        self.flush_events()
        if self._publisher is not None:
            await self._publisher.quiesce()

    def announce(self) -> None:
        """Wakes everybody who waits for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for_change(self) -> None:
        """Returns after the next step or announcement."""
        await self._changed.wait()

    def _deliver(self, step: StepOutput) -> None:
        prepared = self._prepare(step)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take, step, prepared)

    def _take(self, step: StepOutput, prepared: T) -> None:
        self._load = step.load
        try:
            self.flush_events()
            self._observe(step)
            self._on_step(step, prepared)
        except Exception as error:
            error_id = new_error_id()
            fields = {"error_id": error_id}
            logger.exception("a step's output could not be handed on; its requests are given up", extra=fields)
            if step.request_ids() != sorted(failed.request_id for failed in step.failed):  # else it fails at failing
                reason = f"its output was lost: {type(error).__name__}: {error}"
                self._engine_loop.fail(step.request_ids(), reason, error_id=error_id)
        self.announce()

    def _observe(self, step: StepOutput) -> None:
        metrics, load = self._metrics, step.load
        metrics.num_requests_running.set(load.num_running)
        metrics.num_requests_waiting.set(load.num_waiting)
        metrics.kv_cache_usage(1 - self.kv_cache.num_free / self.kv_cache.num_blocks)
        metrics.generation_tokens.inc(len(step.tokens))
        if step.drafts:
            metrics.spec_decode_num_drafts.inc(len(step.drafts))
            metrics.spec_decode_num_draft_tokens.inc(sum(drafted for drafted, _ in step.drafts))
            metrics.spec_decode_num_accepted_tokens.inc(sum(accepted for _, accepted in step.drafts))
        if step.seconds:
            metrics.step_seconds.observe(step.seconds)
        self._tier_report.observe()
        if self.engine.adapters is not None:
            max_loras = self.engine.scheduler.config.max_loras
            metrics.lora_requests_info(max_loras, load.running_adapters, load.waiting_adapters)
        num_preemptions = self.engine.scheduler.num_preemptions
        metrics.num_preemptions.inc(num_preemptions - self._num_preemptions)
        self._num_preemptions = num_preemptions
