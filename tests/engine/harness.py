"""Runs the scheduler on the fake runner and compares with an oracle that knows no batches, no cache and no blocks."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.admission import SchedulerConfig
from engine.decode_pipeline import DecodePipeline, plain_decodes
from engine.draft.drafter import Drafter
from engine.kv_cache import KvCache
from engine.request import ChoiceState, EngineRequest, FinishReason, HeldKv, PrefillProgress, StepOutput
from engine.scheduler import Scheduler
from engine.sequence import Schedule
from engine.speculation import Speculator
from engine.step_pace import StepPace
from engine.tiers.disk_slots import DiskSlots
from engine.tiers.host_slots import HostSlots
from engine.tiers.kv_tiers import KvTiers
from engine.tiers.store_format import StoreFormat
from engine.tiers.tier import Slots, Tier
from engine.transfer.block_io import HostBlocks
from kvstore.block_pool import BlockPool
from kvstore.block_store import BlockStore
from kvstore.kv_groups import RELEASED, KvGroup, KvGroups, plan_groups
from kvstore.tier_book import TierBook
from kvstore.tier_chain import TierChain
from pagewire.sampling import SamplingParams
from pagewire.speculative import SpeculativeConfig
from tests.engine.fake_runner import EOS, VOCAB_SIZE, FakeRunner, next_token, suppressed
from tests.engine.tiers.costs import load_whatever_it_costs

BLOCK_SIZE = 4


def expected_outputs(request: EngineRequest, max_model_len: int) -> dict[int, tuple[list[int], FinishReason]]:
    """What each choice that is not finished has to produce after what it has, and why it ends."""
    params, states = request.params, {state.choice: state for state in request.choices}
    outputs = {}
    for choice in range(params.n):
        state = states.get(choice, ChoiceState(choice))
        if state.finished:
            continue
        tokens, first = [*request.prompt_token_ids, *state.output_token_ids], len(state.output_token_ids)
        index, reason = first, None
        while reason is None:
            token = next_token(tokens, choice, suppressed(params.stop_token_ids, index, params.min_tokens))
            tokens.append(token)
            stops = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
            if stops and index >= params.min_tokens:
                reason = FinishReason.STOP
            elif index + 1 == params.max_tokens or len(tokens) == max_model_len:
                reason = FinishReason.LENGTH
            index += 1
        outputs[choice] = (tokens[len(request.prompt_token_ids) + first :], reason)
    return outputs


@dataclass
class Harness:
    """A scheduler, a cache and a fake runner; collects outputs and checks every step."""

    num_blocks: int = 16
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 4
    max_model_len: int = 40
    block_size: int = BLOCK_SIZE
    enable_caching: bool = True
    speculator: Speculator | None = None
    pace: StepPace | None = None
    make_drafter: Callable[[BlockPool], tuple[SpeculativeConfig, Drafter]] | None = None
    may_break: bool = False
    is_async: bool = False
    max_loras: int = 0
    windows: tuple[int | None, ...] = (None,)
    group_windows: tuple[int | None, ...] = ()
    num_host_blocks: int = 0
    disk: Callable[[int, int], DiskSlots] | None = None
    store: Callable[[int, int], tuple[BlockStore, StoreFormat]] | None = None
    wrap_slots: Callable[[Slots], Slots] = lambda slots: slots
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    progress: dict[str, list[PrefillProgress]] = field(default_factory=lambda: defaultdict(list))
    held: dict[str, HeldKv] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        groups = plan_groups(self.windows, block_size=self.block_size, max_chunk=self.max_num_batched_tokens)
        if self.group_windows:  # a group for each
            each = tuple(KvGroup((layer,), window) for layer, window in enumerate(self.group_windows))
            groups = KvGroups(each, self.block_size, self.max_num_batched_tokens)
        pool = BlockPool(
            self.num_blocks,
            enable_caching=self.enable_caching,
            num_groups=len(groups),
            closes_chains=groups.groups[0].window is not None,
        )
        self.cache = KvCache(pool, b"r" * 32, self.block_size, groups)
        self.drafter = None
        if self.make_drafter is not None:
            speculative, self.drafter = self.make_drafter(pool)
            self.speculator = Speculator(speculative, self.drafter)
        config = SchedulerConfig(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.block_size,
            self.max_model_len,
            frozenset({EOS}),
            VOCAB_SIZE,
            max_loras=self.max_loras,
        )
        self.runner = FakeRunner(self.num_blocks, self.block_size, groups)
        self.tiers = self._make_tiers() if self.num_host_blocks or self.disk or self.store else None
        load_whatever_it_costs(self.tiers)
        self.scheduler = Scheduler(config, self.cache, self.speculator, self.tiers, self.pace)
        self.pipeline = DecodePipeline(self.scheduler, self.runner)

    def _make_tiers(self) -> KvTiers:
        """Tiers that copy what the fake runner stores; `disk` and `store` are made for (block size, block bytes)."""
        buffer, tiers, chain = self.runner.slots.view(np.uint8), [], TierChain(self.cache.groups)
        if self.num_host_blocks:
            host = self.wrap_slots(HostSlots(self.num_host_blocks, buffer.shape[1]))
            tiers.append(Tier("host", host, TierBook(host.num_slots, chain=chain)))
        if self.disk is not None:
            slots = self.disk(self.block_size, buffer.shape[1])
            book = TierBook(slots.num_slots, chain=chain)
            slots.restore(book)
            tiers.append(Tier("disk", slots, book))
        return KvTiers(
            self.cache,
            HostBlocks(buffer),
            tiers,
            None if self.store is None else self.store(self.block_size, buffer.shape[1]),
        )

    def add(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def ask(self, request_id: str, prompt: list[int] | int, **params: object) -> EngineRequest:
        """Adds a request; a number stands for a prompt of that many tokens, different for each request."""
        names = ("prefill_only", "priority", "tenant", "choices", "adopted", "cache_salt")
        fields = {name: params.pop(name) for name in names if name in params}
        if isinstance(prompt, int):
            prompt = prompt_of(prompt, salt=len(self.requests))
        request = EngineRequest(request_id, tuple(prompt), SamplingParams(**params), **fields)  # type: ignore[arg-type]
        self.add(request)
        return request

    def abort(self, request_id: str) -> bool:
        self.aborted.add(request_id)
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.pipeline.is_busy

    def step(self) -> StepOutput:
        return self._take(self.pipeline.step() if self.pipeline.is_busy else self._step())

    def _step(self) -> StepOutput:
        schedule = self.scheduler.schedule()
        if schedule.is_empty and self.tiers is not None:
            self.tiers.wait_for_load(0.01)
        num_tokens = sum(item.num_new_tokens for item in schedule.items)
        assert num_tokens <= self.max_num_batched_tokens
        if self.drafter is not None:
            schedule = self.drafter.make(schedule)
            assert self.may_break or not self.drafter.is_broken
        assert len(schedule.items) <= self.max_num_seqs
        # Free, it could be handed to a transfer, which writes from another thread, before the copy is made.
        assert all(self.cache.ref_count(source) for source, _ in schedule.copies), "a block to be copied was let go"
        self._check_writes(schedule)
        if self.is_async and plain_decodes(schedule):
            self.pipeline.start(schedule)
            return self.pipeline.step()
        only_decodes = all(
            item.sequence.num_output_tokens and item.num_new_tokens == 1 + len(item.draft_token_ids)
            for item in schedule.items
        )
        sampled = [] if schedule.is_empty else self.runner.execute(schedule)
        if self.drafter is not None:
            self.drafter.settle(schedule, sampled)
        output = self.scheduler.update(schedule, sampled)
        assert not (only_decodes and output.num_prefill_tokens), "drafts are no prefill"
        return output

    def _check_writes(self, schedule: Schedule) -> None:
        """Nobody writes to a block that others may find."""
        for item in schedule.items:
            first, end = item.start // self.block_size, -(-(item.start + item.num_new_tokens) // self.block_size)
            for table in item.sequence.tables:
                assert not any(map(self.cache._pool.is_committed, table[first:end])), "a committed block is written to"

    def _take(self, output: StepOutput) -> StepOutput:
        self.scheduler.check_integrity()
        self.check_held()
        assert output.load.num_running <= self.max_num_seqs
        for token in output.tokens:
            request, key = self.requests[token.request_id], (token.request_id, token.choice)
            earlier = {state.choice: len(state.output_token_ids) for state in request.choices}.get(token.choice, 0)
            assert token.index == earlier + len(self.tokens[key]), "an output index is doubled or skipped"
            assert key not in self.reasons, "a token after the end"
            self.tokens[key].append(token.token_id)
            if token.finish_reason is not None:
                self.reasons[key] = token.finish_reason
        self.num_drafted += sum(drafted for drafted, _ in output.drafts)
        self.num_accepted += sum(accepted for _, accepted in output.drafts)
        for request_id, num_cached in output.cached:
            assert request_id not in self.cached, "cache hits reported twice"
            self.cached[request_id] = num_cached
        for request_id, tier, num_tokens in output.loaded:
            self.loaded[request_id][tier] = num_tokens
        for progress in output.progress:
            self.progress[progress.request_id].append(progress)
        for held in output.held:
            self.held[held.request_id] = held
        return output

    def check_held(self) -> None:
        """No running sequence holds more of a group that slides than its window, a chunk and a block."""
        groups = self.cache.groups
        for sequence in self.scheduler._queues.running:
            for group, table in enumerate(sequence.tables):
                most = groups.most_held(group)
                assert most is None or sum(block_id != RELEASED for block_id in table) <= most

    def run(self, max_steps: int = 2000) -> None:
        """Steps until everything has ended."""
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.scheduler.load()}")

    def run_with_release(self, max_steps: int = 2000) -> None:
        """Like `run`; what prefill_only requests hand over is given back after each step."""
        for _ in range(max_steps):
            self.release_held()
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.scheduler.load()}")

    def check_outputs(self) -> None:
        """Every request that was not aborted produced what the oracle says, and ended for that reason."""
        for request_id, request in self.requests.items():
            outputs = expected_outputs(request, self.max_model_len)
            for choice, (tokens, reason) in outputs.items():
                key = (request_id, choice)
                if request_id in self.aborted:
                    assert self.tokens[key] == tokens[: len(self.tokens[key])]
                elif request.prefill_only:
                    has_output = any(state.output_token_ids for state in request.choices if not state.finished)
                    several = len(outputs) > 1  # different histories: only the prompt's KV is computed
                    assert self.tokens[key] == ([] if several and has_output else tokens[:1]), key
                    ends = reason is FinishReason.STOP and len(tokens) == 1 and not (several and has_output)
                    assert self.reasons.get(key) is (reason if ends else None), key
                else:
                    assert (self.tokens[key], self.reasons[key]) == (tokens, reason), key

    def release_held(self) -> None:
        for held in self.held.values():
            self.cache.release(held.all_block_ids)
        self.held.clear()

    def check_idle(self) -> None:
        """Nothing is left: no request, no reference."""
        self.release_held()
        assert not self.has_work
        if self.tiers is not None:
            assert self.tiers.quiesce()
            self.tiers.check_integrity()
            self.tiers.close()
        assert (self.cache.num_free, self.cache.num_referenced) == (self.num_blocks, 0)
        self.scheduler.check_integrity()


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    """A prompt without EOS, different for each salt from its first token on."""
    return [3 + (7 * salt + 5 * i + i * i) % (VOCAB_SIZE - 3) for i in range(num_tokens)]
