"""The one scheduler of prefill and decode: which requests there are, and what their steps have computed.

    schedule()   plans the next step (`engine/planner.py`)
    update()     books what the step computed: commits full blocks, appends tokens, forks, finishes

Pure: no clock, no I/O, no torch.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.adapter_places import names_of_adapters
from engine.admission import SchedulerConfig, check_request, num_tokens_of_work, starting_sequences
from engine.block_tables import BlockTables
from engine.errors import RequestRefused
from engine.kv_cache import KvCache
from engine.planner import StepPlanner
from engine.reports import report_prefill, report_tokens
from engine.request import AdoptedKv, EngineLoad, EngineRequest, PromptLogprobs, RequestFailed, StepOutput
from engine.sample import SampledToken
from engine.sequence import Schedule, ScheduledSequence, Sequence
from engine.sequence_queues import SequenceQueues
from engine.speculation import Speculator
from engine.step_pace import StepPace
from engine.tier_loads import TierLoads
from engine.tiers.kv_tiers import KvTiers


class Scheduler:
    """Not thread-safe: everything happens on the thread that owns the device. See the module's docstring."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KvCache,
        speculator: Speculator | None = None,
        tiers: KvTiers | None = None,
        pace: StepPace | None = None,
    ) -> None:
        num_tokens = kv_cache.groups.longest_sequence(kv_cache.num_blocks, config.max_model_len)
        if config.max_model_len > num_tokens:
            raise ValueError(
                f"max_model_len {config.max_model_len} does not fit the pool: {kv_cache.num_blocks} blocks of "
                f"{kv_cache.block_size} tokens hold {num_tokens}"
            )
        self.config = config
        self._cache = kv_cache
        self._tables = BlockTables(kv_cache)
        self._queues = SequenceQueues()
        loads = TierLoads(kv_cache, self._tables, tiers)
        self._planner = StepPlanner(config, kv_cache, self._tables, loads, self._queues, speculator, pace)
        self._speculator = speculator
        self._num_arrivals = 0
        self._ahead: Schedule | None = None

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    @property
    def has_work(self) -> bool:
        return bool(self._queues.requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._queues.requests

    def request_ids(self) -> list[str]:
        return list(self._queues.requests)

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestRefused; `adopted` blocks are the scheduler's in either case."""
        try:
            if request.request_id in self:
                raise RequestRefused(
                    "request_id", f"{request.request_id!r} is in use already", value=request.request_id
                )
            check_request(request, self.config, self._cache.num_blocks, self._cache.groups)
        except RequestRefused:
            if request.adopted is not None:
                self._cache.release(request.adopted.all_block_ids)
            raise
        self._num_arrivals += 1
        sequences = starting_sequences(request, self._num_arrivals)
        if request.adopted is not None:
            sequences = self._adopt(sequences, request.adopted)
        elif self.has_work:
            self._tables.renew(sequences[0])
        cost = num_tokens_of_work(request, self.config.max_model_len)
        self._queues.add(request, sequences, cost)

    def abort(self, request_id: str) -> bool:
        """Ends a request in whatever state it is and frees everything; False if there is none."""
        live = self._queues.requests.get(request_id)
        if live is None:
            return False
        for sequence in list(live.sequences):
            self._end(sequence)
        return True

    def load(self) -> EngineLoad:
        """How busy this engine is now."""
        waiting, running = self._queues.waiting, self._queues.running
        admitted = [seq for seq in running if seq.num_remaining_tokens > 1]
        admitted += [seq for seq in waiting if self._queues.requests[seq.request_id].is_admitted]
        return EngineLoad(
            num_running=len(running),
            num_waiting=len(waiting),
            num_tokens_to_compute=sum(seq.num_remaining_tokens for seq in admitted),
            num_free_blocks=self._cache.num_free,
            num_blocks=self._cache.num_blocks,
            running_adapters=names_of_adapters(running) if self.config.max_loras else (),
            waiting_adapters=names_of_adapters(waiting) if self.config.max_loras else (),
        )

    def check_integrity(self) -> None:
        self._queues.check_integrity()
        self._cache.check_integrity()

    # --- planning a step ---

    def schedule(self) -> Schedule:
        """The next step's work. Empty although there is work: blocks are held elsewhere, try again later."""
        self._tables.forget_copies()
        return self._planner.plan()

    def schedule_ahead(self, running: Schedule) -> Schedule | None:
        """The step after one that was started and is not booked; None if that one's tokens must be known first.

        `running` has `plain_decodes`. Whatever is given up until this one is booked stays taken as long.
        """
        self._ahead = self._planner.plan_ahead(running)
        if self._ahead is not None:
            self._tables.releases.hold_back()
        return self._ahead

    # --- booking a step ---

    def update(self, schedule: Schedule, sampled: Seq[Seq[SampledToken]]) -> StepOutput:
        """Books what the runner did; `sampled` has one list for each item, empty where nothing was to be sampled.

        After drafts it has the tokens up to the first that is not the draft, that one included.
        """
        self._landed(schedule)
        num_prefill_tokens = sum(
            num_tokens
            for item in schedule.items
            if (num_tokens := item.num_new_tokens - len(item.draft_token_ids)) > 1
            or not item.sequence.num_output_tokens
        )
        output = StepOutput(
            admitted=list(schedule.admitted),
            cached=list(schedule.cached),
            loaded=list(schedule.loaded),
            num_prefill_tokens=num_prefill_tokens,
        )
        for item, tokens in zip(schedule.items, sampled, strict=True):
            if not item.sequence.is_running:  # a sibling's failure has ended the request
                continue
            if item.draft_token_ids:
                self._book_drafted(item, tokens, output)
            else:
                self._book(item, tokens, output)
        return replace(output, load=self.load())

    def fail(self, request_ids: Iterable[str], message: str) -> StepOutput:
        """Gives up these requests, since a step went wrong."""
        self._landed(None)
        failed = [RequestFailed(request_id, message) for request_id in request_ids if self.abort(request_id)]
        return StepOutput(failed=failed, load=self.load())

    def _landed(self, schedule: Schedule | None) -> None:
        """That step has ended (None: whatever was running); one that was planned ahead of its end may go on."""
        if schedule is None or schedule is self._ahead:
            self._ahead = None
        self._tables.releases.landed(going_on=self._ahead is not None)
        self._tables.forget_copies()

    def _book(self, item: ScheduledSequence, tokens: Seq[SampledToken], output: StepOutput) -> None:
        sequence = item.sequence
        self._queues.count_work(sequence, item.num_new_tokens)
        if sequence.new_prompt_logprobs:
            entries, sequence.new_prompt_logprobs = tuple(sequence.new_prompt_logprobs), []
            start = sequence.num_computed_tokens + 1
            output.prompt_logprobs.append(PromptLogprobs(sequence.request_id, start, entries))
            sequence.wants_prompt_logprobs = start + len(entries) < sequence.num_prompt_tokens
        self._tables.commit(sequence, sequence.num_computed_tokens + item.num_new_tokens)
        broken = next((token for token in tokens if token.error is not None), None)
        if broken is not None:
            self.abort(sequence.request_id)
            output.failed.append(RequestFailed(sequence.request_id, broken.error or "", field=broken.field))
            return
        going_on = report_tokens(sequence, tokens, self.config, output)
        if sequence.prefill_only:
            if report_prefill(sequence, output, item.num_new_tokens, self._tables.wanted_from(sequence)):
                self._end(sequence)
        elif sequence.branches and not sequence.num_remaining_tokens:
            self._replace_by_branches(sequence, going_on)
        elif item.sample:
            sequence.token_ids += going_on.values()
            if not going_on:
                self._end(sequence)

    def _book_drafted(self, item: ScheduledSequence, tokens: Seq[SampledToken], output: StepOutput) -> None:
        """One token after another, as if each had had a step of its own; the KV of rejected drafts is overwritten."""
        sequence, num_drafted, num_accepted = item.sequence, len(item.draft_token_ids), len(tokens) - 1
        output.drafts.append((num_drafted, num_accepted))
        if self._speculator is not None:
            self._speculator.learn(sequence, num_drafted, num_accepted)
        for token in tokens:
            self._book(ScheduledSequence(sequence, 1, True), [token], output)
            if not sequence.is_running:
                return

    def _replace_by_branches(self, trunk: Sequence, first_tokens: dict[int, int]) -> None:
        """The trunk is computed: its branches go on from here, but for those that ended with their first token."""
        num_slots = self._planner.num_slots
        slots = self.config.max_num_seqs - sum(map(num_slots, self._queues.running)) + num_slots(trunk)
        branches = self._fork(trunk, first_tokens)
        self._tables.free(trunk)
        self._queues.replace(trunk, branches, slots)

    def _fork(self, trunk: Sequence, first_tokens: dict[int, int]) -> list[Sequence]:
        prompt, branches = trunk.request.prompt_token_ids, []
        for choice, tokens in trunk.branches:
            if trunk.choices_to_sample:
                if choice not in first_tokens:
                    continue
                tokens = (first_tokens[choice],)
            branch = Sequence(trunk.request, trunk.arrival, choice, [*prompt, *tokens], choices_to_sample=(choice,))
            branch.fair_tag = trunk.fair_tag
            self._tables.fork(trunk, branch)
            branches.append(branch)
        return branches

    def _adopt(self, sequences: list[Sequence], adopted: AdoptedKv) -> list[Sequence]:
        """Puts transferred KV under a starting request; a trunk that has nothing left to compute forks at once."""
        first, *others = sequences
        if others:  # they share nothing, so there is nothing to adopt
            self._cache.release(adopted.all_block_ids)
            return sequences
        forks_at_once = bool(first.branches) and not first.choices_to_sample
        self._tables.adopt(first, adopted, first.num_tokens - (not forks_at_once))
        if first.num_remaining_tokens:
            return sequences
        branches = self._fork(first, {})
        self._tables.free(first)
        return branches

    def _end(self, sequence: Sequence) -> None:
        if self._speculator is not None:
            self._speculator.ended(sequence)
        self._tables.free(sequence)
        self._queues.remove(sequence)
