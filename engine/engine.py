"""The engine: a model, its KV memory and the scheduler, driven step by step from one thread.

It knows no service and no text. The workers run it through `EngineLoop`; in one process, `generate` is the reference
that all other paths are compared with.
"""

import logging
import secrets
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import replace

from engine.admission import check_request
from engine.build import EngineParts, Progress, build_parts
from engine.decode_pipeline import DecodePipeline, plain_decodes
from engine.draft.drafter import Drafter
from engine.errors import EngineError, RequestRefused
from engine.lora.errors import AdapterLoadFailed, AdapterNotFound
from engine.request import AdapterId, EngineLoad, EngineRequest, RequestFailed, StepOutput
from engine.sequence import Schedule
from kvstore.events import CacheEvent
from pagewire.config import EngineOptions
from pagewire.grammar import GrammarCompiler, GrammarError
from pagewire.sampling import SamplingParams
from pagewire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 1.0
"""The longest wait for a tier in `generate` before the next try."""


class Engine:
    """Everything but `check` and `kv_cache` belongs to the thread that calls `step`."""

    def __init__(
        self, options: EngineOptions, *, parts: EngineParts | None = None, progress: Progress | None = None
    ) -> None:
        """Builds what `options` describe; `progress(bytes done, bytes in all)` follows the weights being loaded.

        `parts` are used instead when given (tests run the scheduler on a fake runner). Raises EngineError for options
        that do not fit the model or the memory, and what loading the model raises.
        """
        parts = build_parts(options, progress) if parts is None else parts
        self.options = options
        self.config = parts.config
        self.memory = parts.memory
        self.kv_cache = parts.kv_cache
        self.scheduler = parts.scheduler
        self.tiers = parts.tiers
        self.root = parts.kv_cache.root
        self.layout_id = parts.memory.layout.layout_id
        self.numerics_class = parts.numerics_class
        self.adapters = parts.adapters
        """None if it serves none. For any thread."""
        path, eos_token_ids = parts.config.path, parts.config.eos_token_ids
        self.grammars = GrammarCompiler(lambda: Tokenizer.load(path), parts.config.vocab_size, eos_token_ids)
        """For any thread but the one that calls `step`."""
        self.death: Future[None] = Future()
        """Gets the error when the engine's thread, or a task beside it, could not go on; never a result."""
        self._runner = parts.runner
        self._drafter = parts.drafter
        self._costs = parts.costs
        self._pace = parts.pace
        self._ranks = parts.ranks
        if self._ranks is not None:
            self._ranks.on_death = self.die
        self._schedule: Schedule | None = None
        starting = parts.starting_runner
        self._pipeline = (
            None if starting is None else DecodePipeline(self.scheduler, starting, self.memory.step_launched)
        )

    def die(self, error: BaseException) -> None:
        """Says through `death` that the process cannot go on; the first reason counts. From any thread."""
        # A SystemExit must not end the process with code 0.
        with suppress(InvalidStateError):
            self.death.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    @property
    def max_model_len(self) -> int:
        """Longest sequence (prompt and output) in tokens; may be lower than asked for (see `size_pool`)."""
        return self.scheduler.config.max_model_len

    @property
    def max_num_seqs(self) -> int:
        return self.scheduler.config.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        return self.scheduler.config.max_num_batched_tokens

    @property
    def num_blocks(self) -> int:
        return self.kv_cache.num_blocks

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or (self._pipeline is not None and self._pipeline.is_busy)

    @property
    def is_stalled(self) -> bool:
        """The last step had nothing it could do although there is work: blocks are held by transfers."""
        return self._schedule is not None and self._schedule.is_empty

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.scheduler

    def check(self, request: EngineRequest) -> None:
        """Raises RequestRefused if the request can never run here. May be called from any thread."""
        check_request(request, self.scheduler.config, self.kv_cache.num_blocks, self.kv_cache.groups)

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestRefused; `adopted` blocks are the engine's in either case.

        A structured output is compiled here unless the request brings its grammar: workers do that on another thread.
        """
        structure = request.params.structured_output
        if structure is not None and request.grammar is None:
            try:
                request = replace(request, grammar=self.grammars.compile(structure))
            except GrammarError as error:
                self.release_adopted(request)
                raise RequestRefused(f"params.structured_output.{structure.kind}", str(error)) from None
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request and frees everything it has; False if there is none."""
        return self.scheduler.abort(request_id)

    def load(self) -> EngineLoad:
        return self.scheduler.load()

    def step(self) -> StepOutput:
        """One step of everything that runs: schedule, run, update.

        With asynchronous scheduling the next step may run already when this one's tokens are returned.
        """
        if self._pipeline is not None and self._pipeline.is_busy:
            return self._pipeline.step()
        self._schedule = None
        self._schedule = self.scheduler.schedule()
        if self._drafter is not None:
            self._schedule = self._make_drafts(self._drafter, self._schedule)
        if self._pipeline is not None and plain_decodes(self._schedule):
            self._pipeline.start(self._schedule)
            return self._pipeline.step()
        only_decodes = all(item.sequence.num_remaining_tokens == 1 for item in self._schedule.items)
        failed: list[RequestFailed] = []
        sampled = None
        while sampled is None:
            began = time.perf_counter()
            try:
                sampled = [] if self._schedule.is_empty else self._runner.execute(self._schedule)
            except AdapterLoadFailed as error:
                failed += self._without_adapter(self._schedule, error)
            finally:
                self.memory.step_launched()
        observer = self._costs if only_decodes else self._pace
        if observer is not None and sampled:
            num_rows = sum(item.num_new_tokens for item in self._schedule.items)
            observer.observe_step(num_rows, time.perf_counter() - began)
        if self._drafter is not None:
            self._drafter.settle(self._schedule, sampled)
        output = self.scheduler.update(self._schedule, sampled)
        return replace(output, failed=[*failed, *output.failed])

    def _make_drafts(self, drafter: Drafter, schedule: Schedule) -> Schedule:
        began = time.perf_counter()
        schedule = drafter.make(schedule)
        if self._costs is not None and drafter.num_forwards:
            self._costs.observe_drafting(drafter.num_forwards, drafter.num_rows, time.perf_counter() - began)
        return schedule

    def _without_adapter(self, schedule: Schedule, error: AdapterLoadFailed) -> list[RequestFailed]:
        """Gives up the requests of this adapter and takes them out of the step, whose blocks have been copied."""
        lost = {item.sequence.request_id for item in schedule.items if item.sequence.request.adapter_key == error.key}
        logger.error("%s; %d requests are given up", error, len(lost))
        items = tuple(item for item in schedule.items if item.sequence.request_id not in lost)
        self._schedule = replace(schedule, items=items, copies=())
        return self.scheduler.fail(sorted(lost), str(error)).failed

    def fail_step(self, message: str) -> StepOutput:
        """After `step` has raised: gives up the requests of that step (all, when not even planning it worked)."""
        if self._schedule is None:
            return self.fail_all(message)
        request_ids = {item.sequence.request_id for item in self._schedule.items} | self._abandon_pipeline()
        return self.scheduler.fail(sorted(request_ids), message)

    def _abandon_pipeline(self) -> set[str]:
        return set() if self._pipeline is None else self._pipeline.abandon()

    def fail(self, request_ids: Iterable[str], message: str, field: str = "") -> StepOutput:
        """Gives up these requests, those too that have ended: what they were to be told has been lost."""
        failed = [RequestFailed(request_id, message, field=field) for request_id in request_ids]
        for each in failed:
            self.abort(each.request_id)
        return StepOutput(failed=failed, load=self.load())

    def fail_all(self, message: str) -> StepOutput:
        """Gives up every request."""
        self._abandon_pipeline()
        return self.scheduler.fail(self.scheduler.request_ids(), message)

    def find_adapter(self, name: str, digest: bytes = b"", generation: int | None = None) -> AdapterId:
        """The adapter for a request. Raises AdapterNotFound."""
        if self.adapters is None:
            raise AdapterNotFound(f"adapter {name!r}: this engine serves no adapters (enable_lora)")
        return self.adapters.find(name, digest, generation)

    def generate(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams],
        adapters: Seq[str] | None = None,
    ) -> list[list[list[int]]]:
        """Output token ids for each prompt and choice; `adapters` are names, "" for the base model.

        Raises EngineError if a request fails.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        names = [""] * len(prompts) if adapters is None else list(adapters)
        outputs: list[list[list[int]]] = []
        for i, (prompt, own, name) in enumerate(zip(prompts, each, names, strict=True)):
            seed = secrets.randbits(64) if own.seed is None else own.seed
            adapter = self.find_adapter(name) if name else None
            self.add(EngineRequest(f"generate-{i}", tuple(prompt), replace(own, seed=seed), adapter=adapter))
            outputs.append([[] for _ in range(own.n)])
        while self.has_work:
            step = self.step()
            for failed in step.failed:
                self.fail_all("another request of the same call has failed")
                raise EngineError(f"{failed.request_id}: {failed.message}")
            for token in step.tokens:
                outputs[int(token.request_id.removeprefix("generate-"))][token.choice].append(token.token_id)
            self.take_events()  # nobody publishes them here, and they must not pile up
            if self.is_stalled and self.tiers is not None:
                self.tiers.wait_for_load(_LOAD_SECONDS)
        return outputs

    def reset_prefix_cache(self) -> int:
        """Forgets what nobody references, in every tier; returns how many blocks of the pool. From any thread."""
        num_blocks = self.kv_cache.reset()
        if self.tiers is not None:
            self.tiers.clear()
        return num_blocks

    def take_events(self) -> list[CacheEvent]:
        """What changed since the last call, on the device and in the tiers; the caller publishes it."""
        return self.kv_cache.take_events() + ([] if self.tiers is None else self.tiers.take_events())

    def release_adopted(self, request: EngineRequest) -> None:
        """Gives back the transferred blocks of a request that was not taken."""
        if request.adopted is not None:
            self.kv_cache.release(request.adopted.all_block_ids)

    def give_up_step(self) -> None:
        """Ends a step that hangs because a rank does; other steps end by themselves. From any thread."""
        if self._ranks is not None:
            self._ranks.kill()

    def close(self) -> None:
        """Gives up what still runs, ends what the tiers do and unmaps the KV memory."""
        with ExitStack() as closing:  # from the last on, each whatever happens to the others
            closing.callback(self.memory.close)
            if self._ranks is not None:
                closing.callback(self._ranks.close)
            if self._drafter is not None:
                closing.callback(self._drafter.close)
            if self.tiers is not None:
                closing.callback(self.tiers.close)
            self.fail_all("the engine is closed")
