"""The one scheduler of prefill and decode: who computes how many tokens in the next step, with which blocks.

    schedule()   running sequences that decode get one token each, and drafts where guessing pays;
                 the rest of the token budget is shared evenly between prompts, running and newly admitted
    update()     books what the step computed: commits full blocks, appends tokens, forks, finishes

A sequence takes blocks as it grows. When none is left, the sequence that ranks last (priority, then the tenants' fair
order, then arrival) gives all of its blocks back, waits, and recomputes later what the prefix cache has lost. Nobody
preempts somebody of better rank, so the best one always gets on. `prefill_only` requests take all blocks at admission
and are never preempted.

Pure: no clock, no I/O, no torch.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.adapter_places import AdapterPlaces, names_of_adapters
from engine.admission import SchedulerConfig, check_request, num_tokens_of_work, starting_sequences
from engine.block_tables import BlockTables
from engine.errors import RequestRefused
from engine.kv_cache import KvCache
from engine.reports import report_prefill, report_tokens
from engine.request import AdoptedKv, EngineLoad, EngineRequest, PromptLogprobs, RequestFailed, StepOutput
from engine.sample import SampledToken
from engine.sequence import Schedule, ScheduledSequence, Sequence
from engine.sequence_queues import SequenceQueues, by_rank
from engine.speculation import Speculator
from engine.tier_loads import TierLoads
from engine.tiers.kv_tiers import KvTiers
from engine.token_budget import share_fairly

PROMPT_LOGPROB_CHUNK = 128
"""Tokens a step of a prompt whose log-probabilities are wanted: each costs a pass over the vocabulary."""


@dataclass(slots=True)
class _Step:
    """What is left of one step's budget and what was planned with it."""

    budget: int
    items: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(default_factory=list)
    loaded: list[tuple[str, str, int]] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.items[sequence] = num_tokens
        self.budget -= num_tokens

    def add_draft(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        self.drafts[sequence] = token_ids
        self.budget -= len(token_ids)

    def planned(self) -> Schedule:
        items = tuple(
            ScheduledSequence(
                seq,
                num + len(drafts := self.drafts.get(seq, ())),
                bool(seq.choices_to_sample) and num == seq.num_remaining_tokens,
                drafts,
            )
            for seq, num in self.items.items()
        )
        return Schedule(items, tuple(self.copies), tuple(self.cached), tuple(self.loaded))


class Scheduler:
    """Not thread-safe: everything happens on the thread that owns the device. See the module's docstring."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KvCache,
        speculator: Speculator | None = None,
        tiers: KvTiers | None = None,
    ) -> None:
        num_tokens = kv_cache.groups.longest_sequence(kv_cache.num_blocks, config.max_model_len)
        if config.max_model_len > num_tokens:
            raise ValueError(
                f"max_model_len {config.max_model_len} does not fit the pool: {kv_cache.num_blocks} blocks of "
                f"{kv_cache.block_size} tokens hold {num_tokens}"
            )
        self.config = config
        self.num_preemptions = 0
        self._cache = kv_cache
        self._tables = BlockTables(kv_cache)
        self._loads = TierLoads(kv_cache, self._tables, tiers)
        self._queues = SequenceQueues()
        self._speculator = speculator
        self._num_arrivals = 0

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
        prefilling = [seq for seq in running if seq.num_remaining_tokens > 1]
        return EngineLoad(
            num_running=len(running),
            num_waiting=len(waiting),
            num_queued_tokens=sum(seq.num_remaining_tokens for seq in (*waiting, *prefilling)),
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
        self._loads.settle()
        step = _Step(self.config.max_num_batched_tokens)
        self._schedule_decodes(step)
        if self._speculator is not None:
            self._schedule_drafts(step, self._speculator)
        self._schedule_prefills(step)
        if not step.items and not self._loads.is_busy:  # everybody sits on blocks that another one needs
            found = self._preempt_worst([*self._queues.running, *self._queues.waiting])
            if not found and self._cache.groups.slides:
                self._preempt_prefill()
        return step.planned()

    def _schedule_decodes(self, step: _Step) -> None:
        for sequence in list(self._queues.running):
            if sequence.is_running and sequence.num_remaining_tokens == 1:
                self._plan(sequence, 1, step)

    def _schedule_drafts(self, step: _Step, speculator: Speculator) -> None:
        """Drafts take what is left: no block of anybody else, and half of the budget where prompts want it."""
        decodes = list(step.items)
        is_shared = len(decodes) < len(self._queues.running) or bool(self._queues.waiting)
        budget = step.budget // 2 if is_shared else step.budget
        for sequence in decodes:
            most = min(budget, self._most_drafts(sequence))
            drafts = speculator.propose(sequence, most, len(self._queues.running))
            end = sequence.num_tokens + len(drafts)
            spare = self._cache.num_free - len(decodes) * len(self._cache.groups)
            if drafts and self._tables.num_missing(sequence, end) <= spare:
                self._tables.grow(sequence, end, step.copies)
                step.add_draft(sequence, drafts)
                budget -= len(drafts)

    def _most_drafts(self, sequence: Sequence) -> int:
        """None where several choices go on from here.

        Drafts beyond the last token that may be sampled would be for nothing.
        """
        if sequence.prefill_only or len(sequence.choices_to_sample) != 1:
            return 0
        room = self.config.max_model_len - sequence.num_tokens - 1
        if sequence.params.max_tokens is not None:
            room = min(room, sequence.params.max_tokens - sequence.num_output_tokens - 1)
        return room

    def _schedule_prefills(self, step: _Step) -> None:
        prefills = [seq for seq in self._queues.running if seq.num_remaining_tokens > 1]
        prefills += self._admit_waiting(step, prefills)
        prefills.sort(key=by_rank)
        demands = [_most_tokens(seq) for seq in prefills]
        shares = share_fairly(step.budget, demands, [seq.request.tenant for seq in prefills])
        for sequence, share in zip(prefills, shares, strict=True):
            if sequence.is_running:
                self._plan(sequence, share, step)

    def _plan(self, sequence: Sequence, num_tokens: int, step: _Step) -> None:
        """Without blocks the sequence keeps what it has and sits this step out."""
        if num_tokens and self._make_room(sequence, num_tokens, step):
            step.add(sequence, num_tokens)

    def _admit_waiting(self, step: _Step, prefills: list[Sequence]) -> list[Sequence]:
        """Lets waiting sequences run, in order of rank, as slots, tokens and blocks allow.

        Once one is held up by blocks, only those that have blocks already may pass it: they end and give them back.
        Once one is held up by its adapter, no other adapter's may pass it: the running ones end and leave it a place.
        Who waits for a tier counts as running and holds nobody up.
        """
        admitted: list[Sequence] = []
        loading = list(self._loads.waiting())
        slots = self.config.max_num_seqs - sum(map(self._num_slots, [*self._queues.running, *loading]))
        tokens = step.budget - len(prefills)
        promised = sum(map(self._num_missing_blocks, [*prefills, *loading]))
        if self._queues.running:
            promised += self._cache.num_blocks // 100  # decodes grow too; admitting on the last block only thrashes
        blocked = False
        places = AdapterPlaces(self.config.max_loras, self._queues.running)
        for sequence in list(self._queues.waiting):
            if slots < self._num_slots(sequence) or tokens < 1:
                break
            if sequence.load is not None or (blocked and not sequence.block_table):
                continue
            if not places.admits(sequence):
                continue
            if not self._admit(sequence, promised):
                blocked = blocked or not self._loads.holds_up(sequence)
                if sequence.load is not None:
                    slots -= self._num_slots(sequence)
                    promised += self._num_missing_blocks(sequence)
                continue
            self._queues.run(sequence)
            places.take(sequence)
            self._report_cached(sequence, step)
            admitted.append(sequence)
            slots -= self._num_slots(sequence)
            tokens -= 1
            promised += self._num_missing_blocks(sequence)
        return admitted

    def _admit(self, sequence: Sequence, promised: int) -> bool:
        """Gives a waiting sequence what the cache has of it.

        False if blocks do not suffice for all its tokens, or a tier brings some of them first.
        """
        holds_blocks = bool(sequence.block_table)
        num_releases, num_restored = self._cache.num_releases, self._cache.num_restored
        if not holds_blocks:
            if self._tables.is_hopeless(sequence, promised):
                return False
            self._tables.match(sequence)
        fits = self._num_missing_blocks(sequence) + promised <= self._cache.num_free
        if fits and not holds_blocks and self._loads.start(sequence, self._cache.num_free - promised):
            return False
        if fits and sequence.prefill_only:
            fits = self._tables.reserve(sequence)
        if not fits and not holds_blocks:
            self._tables.give_up(sequence, num_releases, num_restored, promised)
        return fits

    def _report_cached(self, sequence: Sequence, step: _Step) -> None:
        """Reports a request's cache hits when it first runs, not again after preemption."""
        live = self._queues.requests[sequence.request_id]
        if not live.admitted:
            live.admitted = True
            step.cached.append((sequence.request_id, sequence.num_cached_tokens))
            step.loaded += [(sequence.request_id, tier, num) for tier, num in sequence.loaded_tokens]
            self._cache.record_query(sequence.num_tokens, sequence.num_cached_tokens)

    def _make_room(self, sequence: Sequence, num_new_tokens: int, step: _Step) -> bool:
        """Blocks for the next tokens, if need be those of sequences of worse rank that this step has not planned."""
        while not self._tables.grow(sequence, sequence.num_computed_tokens + num_new_tokens, step.copies):
            others = (seq for seq in (*self._queues.running, *self._queues.waiting) if seq not in step.items)
            if not self._preempt_worst(seq for seq in others if seq.rank > sequence.rank):
                return False
        return True

    def _preempt_worst(self, sequences: Iterable[Sequence]) -> bool:
        """Takes its blocks from the worst ranking sequence that has some; False if there is none."""
        candidates = [
            seq
            for seq in sequences
            if seq.block_table and seq.load is None and not (seq.is_running and seq.prefill_only)
        ]
        if candidates:
            self._preempt(max(candidates, key=by_rank))
        return bool(candidates)

    def _preempt_prefill(self) -> None:
        """The last resort where groups slide, since those take blocks on the way: the worst `prefill_only` one waits.

        What others read of it has references of its own, and is computed again with the same values.
        """
        if len(self._queues.running) > 1:
            self._preempt(max(self._queues.running, key=by_rank))

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._tables.free(sequence)
        sequence.asked_store = False
        if sequence.is_running:
            self._queues.wait(sequence)

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        return self._tables.num_missing_on_the_way(sequence)

    def _num_slots(self, sequence: Sequence) -> int:
        """Running sequences this one counts as: a trunk will be replaced by its branches."""
        return max(1, min(len(sequence.branches), self.config.max_num_seqs))

    # --- booking a step ---

    def update(self, schedule: Schedule, sampled: Seq[Seq[SampledToken]]) -> StepOutput:
        """Books what the runner did; `sampled` has one list for each item, empty where nothing was to be sampled.

        After drafts it has the tokens up to the first that is not the draft, that one included.
        """
        self._tables.forget_copies()
        num_prefill_tokens = sum(
            num_tokens
            for item in schedule.items
            if (num_tokens := item.num_new_tokens - len(item.draft_token_ids)) > 1
            or not item.sequence.num_output_tokens
        )
        output = StepOutput(
            cached=list(schedule.cached), loaded=list(schedule.loaded), num_prefill_tokens=num_prefill_tokens
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
        self._tables.forget_copies()
        failed = [RequestFailed(request_id, message) for request_id in request_ids if self.abort(request_id)]
        return StepOutput(failed=failed, load=self.load())

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
        slots = self.config.max_num_seqs - sum(map(self._num_slots, self._queues.running)) + self._num_slots(trunk)
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


def _most_tokens(sequence: Sequence) -> int:
    """Tokens that a sequence may compute in one step."""
    num_remaining = sequence.num_remaining_tokens
    return min(num_remaining, PROMPT_LOGPROB_CHUNK) if sequence.wants_prompt_logprobs else num_remaining
