"""Drafts made by a model: who gets some, who first has to catch up, and what they leave behind. No torch, no clock.

    propose()    while a step is planned: -1 for each draft to be made, so that blocks and budget are kept
    make()       before the step runs: puts the model's guesses in their place, none where it has not got so far
    settle()     after the step: the KV of drafts that came true counts

All sequences of a step are drafted together, one forward for each drafted position. The first one also computes what
the draft's KV lacks of a sequence: two tokens at most while it decodes; all of its text after a transfer, a hit of the
prefix cache, a preemption or a migration, in pieces that a step's budget bounds. Until it has caught up the sequence
decodes without drafts.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from engine.draft.book import DraftBook
from engine.finish import is_stop_token
from engine.sample import SampledToken
from engine.sequence import Schedule, ScheduledSequence, Sequence
from engine.speculation import MADE, Allowance

PLANNED = -1
"""Stands for a draft that is still to be made."""

_USUAL_LAG = 2  # the token drawn last, and the last draft if all came true: it was never an input
_MOST_LAG_PER_TOKEN = 16  # to read so many tokens costs about what drafts can save on one

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """The draft model computes `sequence`'s tokens from position `start` to `end`; `sample`: and draws the next one.

    `draft_token_ids` follow the sequence's tokens.
    """

    sequence: Sequence
    start: int
    end: int
    sample: bool
    draft_token_ids: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """Those from `start` to `end`."""
        known = self.sequence.num_tokens
        drafts = self.draft_token_ids[max(0, self.start - known) : max(0, self.end - known)]
        return [*self.sequence.token_ids[self.start : self.end], *drafts]


class DraftModel(Protocol):
    """Runs the draft model on its KV memory."""

    def run(self, chunks: Seq[DraftChunk]) -> list[int | None]:
        """One forward for all chunks. The token each drew; None if it was not to, or none could be drawn."""
        ...

    def close(self) -> None:
        """Gives its memory back."""
        ...


class Drafter:
    """The proposer that asks a model. What goes wrong in it costs speed, never a token or a request."""

    def __init__(
        self,
        model: DraftModel,
        book: DraftBook,
        *,
        max_position: int,
        max_catch_up_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """The model has `max_position` positions; a step catches up on at most `max_catch_up_tokens`."""
        self._model = model
        self._book = book
        self._max_position = max_position
        self._max_catch_up_tokens = max_catch_up_tokens
        self._eos_token_ids = eos_token_ids
        self._catch_up_tokens_left = max_catch_up_tokens
        self.num_forwards = 0
        self.num_rows = 0
        self.is_broken = False

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        """`PLANNED` for each draft to be made; none where they can't pay for what there is to catch up on.

        One where that is more than this step can read: it lets the sequence catch up, and takes no budget for drafts
        that won't be made.
        """
        room = self._max_position + 1 - sequence.num_tokens
        if self.is_broken or room < 1:
            return ()
        lag, max_tokens = self._lag(sequence), sequence.params.max_tokens
        must_catch_up = lag > _USUAL_LAG
        num_left = room if max_tokens is None else max_tokens - sequence.num_output_tokens
        if must_catch_up and lag > _MOST_LAG_PER_TOKEN * num_left:
            return ()
        most = min(room, allowance(MADE, lag if must_catch_up else 0))
        if must_catch_up and most:
            if lag > self._catch_up_tokens_left:
                return (PLANNED,)
            self._catch_up_tokens_left -= lag
        return (PLANNED,) * most

    def make(self, schedule: Schedule) -> Schedule:
        """The schedule with the drafts that were planned in it, as far as they could be made; ends planning."""
        self._catch_up_tokens_left = self._max_catch_up_tokens
        self.num_forwards = self.num_rows = 0  # of this step
        planned = [item for item in schedule.items if item.draft_token_ids]
        if not planned:
            return schedule
        try:
            drafts = self._draft(planned)
        except Exception:
            logger.exception("the draft model has failed; from now on there is no speculation")
            self.is_broken = True
            drafts = {}
        items = tuple(
            _with_drafts(item, drafts.get(item.sequence, ())) if item.draft_token_ids else item
            for item in schedule.items
        )
        return replace(schedule, items=items)

    def settle(self, schedule: Schedule, sampled: Seq[Seq[SampledToken]]) -> None:
        """Counts the KV of drafts that came true; to be called before what was sampled is booked.

        The last draft was never an input, so it has none.
        """
        for item, tokens in zip(schedule.items, sampled, strict=True):
            if item.draft_token_ids:
                num_true = min(len(tokens), len(item.draft_token_ids)) - 1
                start = item.sequence.num_tokens
                self._book.fill(item.sequence.block_table, start, start + num_true)

    def close(self) -> None:
        self._model.close()

    def _lag(self, sequence: Sequence) -> int:
        """Tokens that the draft has not computed; at least 1, since the last one's forward is needed in any case."""
        return sequence.num_tokens - min(self._book.num_filled(sequence.block_table), sequence.num_tokens - 1)

    def _draft(self, planned: list[ScheduledSequence]) -> dict[Sequence, tuple[int, ...]]:
        wanted = {item.sequence: len(item.draft_token_ids) for item in planned}
        drafts: dict[Sequence, tuple[int, ...]] = {}
        chunks = self._first_chunks(list(wanted))
        while chunks:
            going_on = []
            self.num_forwards += 1
            self.num_rows += sum(chunk.end - chunk.start for chunk in chunks)
            for chunk, token_id in zip(chunks, self._model.run(chunks), strict=True):
                sequence = chunk.sequence
                if chunk.start < sequence.num_tokens:
                    self._book.fill(sequence.block_table, chunk.start, chunk.end)
                if token_id is None:
                    continue
                made = drafts[sequence] = (*chunk.draft_token_ids, token_id)
                if len(made) < wanted[sequence] and not self._ends(sequence, made):
                    going_on.append(DraftChunk(sequence, chunk.end, chunk.end + 1, True, made))
            chunks = going_on
        return drafts

    def _first_chunks(self, sequences: list[Sequence]) -> list[DraftChunk]:
        """What is computed first; those with the most to catch up on come last, and get what the budget leaves.

        Of several that lack the same block one computes it, the others have it in the next step.
        """
        budget, taken, chunks = self._max_catch_up_tokens, set(), []
        for lag, sequence in sorted(((self._lag(each), each) for each in sequences), key=lambda pair: pair[0]):
            start = sequence.num_tokens - lag
            num_tokens = lag
            if lag > _USUAL_LAG:
                block = sequence.block_table[start // self._book.block_size]
                num_tokens = 0 if block in taken else min(lag, budget)
                budget -= num_tokens
                taken.add(block)
            if num_tokens:
                chunks.append(DraftChunk(sequence, start, start + num_tokens, num_tokens == lag))
        return chunks

    def _ends(self, sequence: Sequence, drafts: tuple[int, ...]) -> bool:
        """Whether the sequence would end with the last draft."""
        index = sequence.num_output_tokens + len(drafts) - 1
        return is_stop_token(drafts[-1], index, sequence.params, self._eos_token_ids)


def _with_drafts(item: ScheduledSequence, draft_token_ids: tuple[int, ...]) -> ScheduledSequence:
    num_missing = len(item.draft_token_ids) - len(draft_token_ids)
    return replace(item, num_new_tokens=item.num_new_tokens - num_missing, draft_token_ids=draft_token_ids)
