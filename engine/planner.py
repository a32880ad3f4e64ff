"""Plans a step: who computes how many tokens, with which blocks. The half of the scheduler that decides.

    running sequences that decode get one token each, and drafts where guessing pays;
    the rest of the token budget, or what a step's pace leaves of it, is shared out between prompts, running and newly
    admitted (`engine/token_budget.py`); one computes what several begin with, the others take it over

A sequence takes blocks as it grows. When none is left, the sequence that ranks last (priority, then the tenants' fair
order, then arrival) gives all of its blocks back, waits, and recomputes later what the prefix cache has lost. Nobody
preempts somebody of better rank, so the best one always gets on. `prefill_only` requests take all blocks at admission
and are never preempted.

Pure: no clock, no I/O, no torch.
"""

from collections.abc import Iterable

from engine.adapter_places import AdapterPlaces
from engine.admission import SchedulerConfig
from engine.block_tables import BlockTables
from engine.common_prefixes import CommonPrefixes
from engine.finish import is_last
from engine.kv_cache import KvCache
from engine.planned_step import PlannedStep
from engine.sequence import Schedule, ScheduledSequence, Sequence
from engine.sequence_queues import SequenceQueues, by_rank
from engine.speculation import Speculator
from engine.step_pace import StepPace
from engine.tier_loads import TierLoads
from engine.token_budget import Prompt, share_out

PROMPT_LOGPROB_CHUNK = 128
"""Tokens a step of a prompt whose log-probabilities are wanted: each costs a pass over the vocabulary."""


class StepPlanner:
    """Moves sequences between the queues and gives them blocks; see the module's docstring."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KvCache,
        tables: BlockTables,
        loads: TierLoads,
        queues: SequenceQueues,
        speculator: Speculator | None,
        pace: StepPace | None = None,
    ) -> None:
        self.num_preemptions = 0
        self._config = config
        self._cache = cache
        self._tables = tables
        self._loads = loads
        self._common = CommonPrefixes(cache, tables)
        self._queues = queues
        self._speculator = speculator
        self._pace = pace
        self._decided_on: tuple[int, ...] = ()

    def num_slots(self, sequence: Sequence) -> int:
        """Running sequences this one counts as: a trunk will be replaced by its branches."""
        return max(1, min(len(sequence.branches), self._config.max_num_seqs))

    def plan(self) -> Schedule:
        """The next step's work. Empty although there is work: blocks are held elsewhere, try again later."""
        self._loads.settle()
        step = PlannedStep(self._config.max_num_batched_tokens)
        self._schedule_decodes(step)
        if self._speculator is not None:
            self._schedule_drafts(step, self._speculator)
        if self._pace is not None:
            num_taken = self._config.max_num_batched_tokens - step.budget
            step.budget = min(step.budget, self._pace.for_prompts(num_taken))
        self._schedule_prefills(step)
        if not step.items and not self._loads.is_busy:  # everybody sits on blocks that another one needs
            found = self._preempt_worst([*self._queues.running, *self._queues.waiting])
            if not found and self._cache.groups.slides:
                self._preempt_prefill()
        self._decided_on = self._situation()
        return step.planned()

    def plan_ahead(self, running: Schedule) -> Schedule | None:
        """The step behind one of plain decodes, before its tokens are known: who is not at its end goes on.

        None if there is anything to decide: who may run, or who has to give up blocks. Who ends by a token that nobody
        has seen yet is still in it, for nothing.
        """
        decoding = [item.sequence for item in running.items if item.sequence.is_running]
        going_on = [sequence for sequence in decoding if not self._ends_next(sequence)]
        if not going_on or len(decoding) < len(self._queues.running) or self._loads.is_busy:
            return None
        if self._queues.waiting and (len(going_on) < len(decoding) or self._situation() != self._decided_on):
            return None
        if any(map(self._tables.is_writing_to_shared, going_on)):  # a copy now would be of a block in the making
            return None
        copies: list[tuple[int, int]] = []
        if not all(self._tables.grow(seq, seq.num_computed_tokens + 2, copies) for seq in going_on):
            return None
        return Schedule(tuple(ScheduledSequence(seq, 1, True, is_ahead=True) for seq in going_on), tuple(copies))

    def _ends_next(self, sequence: Sequence) -> bool:
        """The next token is its last one, whatever it is."""
        index, num_tokens = sequence.num_output_tokens, sequence.num_tokens + 1
        return is_last(index, num_tokens, sequence.params, self._config.max_model_len)

    def _situation(self) -> tuple[int, ...]:
        """As long as it is the same, nobody who waits could be admitted: nothing has come, ended or become free."""
        return (self._queues.num_changes, self._cache.num_releases, self._cache.num_restored)

    def _schedule_decodes(self, step: PlannedStep) -> None:
        for sequence in list(self._queues.running):
            if sequence.is_running and sequence.num_remaining_tokens == 1:
                self._plan(sequence, 1, step)

    def _schedule_drafts(self, step: PlannedStep, speculator: Speculator) -> None:
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
        room = self._config.max_model_len - sequence.num_tokens - 1
        if sequence.params.max_tokens is not None:
            room = min(room, sequence.params.max_tokens - sequence.num_output_tokens - 1)
        return room

    def _schedule_prefills(self, step: PlannedStep) -> None:
        prefills = [seq for seq in self._queues.running if seq.num_remaining_tokens > 1]
        prefills += self._admit_waiting(step, prefills)
        prefills.sort(key=by_rank)
        shares = share_out(step.budget, list(map(self._wants, prefills)))
        for sequence, share in zip(prefills, shares, strict=True):
            if share and sequence.is_running:
                self._common.take_over(sequence)
                self._plan(sequence, min(share, _most_tokens(sequence)), step)

    def _wants(self, sequence: Sequence) -> Prompt:
        next_block, num_found = self._common.look_up(sequence)
        urgency = (sequence.request.priority, sequence.num_remaining_tokens - num_found)
        return Prompt(_most_tokens(sequence, num_found), sequence.request.tenant, urgency, next_block)

    def _plan(self, sequence: Sequence, num_tokens: int, step: PlannedStep) -> None:
        """Without blocks the sequence keeps what it has and sits this step out."""
        if self._make_room(sequence, num_tokens, step):
            step.add(sequence, num_tokens)
            self._report_cached(sequence, step)

    def _admit_waiting(self, step: PlannedStep, prefills: list[Sequence]) -> list[Sequence]:
        """Lets waiting sequences run, in order of rank, as slots and blocks allow; returns those to share tokens with.

        Who has only its last token to compute, since all others are cached, does so at once, like one that decodes.

        Once one is held up by blocks, only those that have blocks already may pass it: they end and give them back.
        Once one is held up by its adapter, no other adapter's may pass it: the running ones end and leave it a place.
        Who waits for a tier counts as running and holds nobody up.
        """
        admitted: list[Sequence] = []
        loading = list(self._loads.waiting())
        slots = self._config.max_num_seqs - sum(map(self.num_slots, [*self._queues.running, *loading]))
        promised = sum(map(self._num_missing_blocks, [*prefills, *loading]))
        if self._queues.running:
            promised += self._cache.num_blocks // 100  # decodes grow too; admitting on the last block only thrashes
        blocked = False
        places = AdapterPlaces(self._config.max_loras, self._queues.running)
        for sequence in list(self._queues.waiting):
            if step.budget < 1 or slots < self.num_slots(sequence):
                break
            if sequence.load is not None or (blocked and not sequence.block_table):
                continue
            if not places.admits(sequence):
                continue
            if not self._admit(sequence, promised, step):
                blocked = blocked or not self._loads.holds_up(sequence)
                if sequence.load is not None:
                    slots -= self.num_slots(sequence)
                    promised += self._num_missing_blocks(sequence)
                continue
            self._queues.run(sequence)
            places.take(sequence)
            if not (live := self._queues.requests[sequence.request_id]).is_admitted:
                live.is_admitted = True
                step.admitted.append(sequence.request_id)
            slots -= self.num_slots(sequence)
            if sequence.num_remaining_tokens == 1:
                self._plan(sequence, 1, step)
            else:
                admitted.append(sequence)
            promised += self._num_missing_blocks(sequence)
        return admitted

    def _admit(self, sequence: Sequence, promised: int, step: PlannedStep) -> bool:
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
            fits = self._tables.reserve(sequence, step.copies)
        if not fits and not holds_blocks:
            self._tables.give_up(sequence, num_releases, num_restored, promised)
        return fits

    def _report_cached(self, sequence: Sequence, step: PlannedStep) -> None:
        """Reports a request's cache hits when it begins, not again after preemption."""
        live = self._queues.requests[sequence.request_id]
        if not live.has_begun:
            live.has_begun = True
            step.cached.append((sequence.request_id, sequence.num_cached_tokens))
            step.loaded += [(sequence.request_id, tier, num) for tier, num in sequence.loaded_tokens]
            self._cache.record_query(sequence.num_tokens, sequence.num_cached_tokens)

    def _make_room(self, sequence: Sequence, num_new_tokens: int, step: PlannedStep) -> bool:
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


def _most_tokens(sequence: Sequence, num_found: int = 0) -> int:
    """Tokens that a sequence may compute in one step, `num_found` of the remaining ones being there."""
    num_remaining = sequence.num_remaining_tokens - num_found
    return min(num_remaining, PROMPT_LOGPROB_CHUNK) if sequence.wants_prompt_logprobs else num_remaining
