"""Speculative decoding: guesses of the next tokens, which the target model checks several at a time.

Exact by construction (DESIGN §4): at every position the target draws the token it would have drawn anyway, with the
same noise; a draft is accepted if and only if it equals that token. A guess can cost time, never change a token.
Deciding is pure: no clock, no device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.draft_costs import DraftCosts
from engine.draft_trial import DraftTrial, speed_up
from engine.sequence import Sequence
from pagewire.speculative import SpeculativeConfig

MADE = 0
"""The kind of drafts that a draft model makes. Kinds come true more or less often; a proposer numbers its own."""

_HOPE, _HOPE_OF_A_MODEL = 0.6, 0.8  # share of a kind's drafts that come true, before any was seen
_HOPE_WEIGHT, _USUAL_KEPT = 1.0, 0.95
_USUAL_WEIGHT, _KEPT = 2.0, 0.7
_USUAL_WEIGHT_OF_A_MODEL, _KEPT_OF_A_MODEL = 4.0, 0.85  # one wrong draft says less of a model than of a match
_FIRST_SLOTS = 256
_PROBING = 0.01  # share of all steps, and of each sequence's, that goes into trying again what did not pay
_FIRST_CREDIT, _MOST_CREDIT = 2.0, 50.0  # steps
_FIRST_PAUSE = 4  # steps
_PART = 0.7  # of what a sequence may lose that one step may: it should have a second chance
_USUAL_OUTPUT = 256  # tokens; who has said more is expected to say as much again
_SURE = 2.0  # what a draft model has to read first must save so many times its cost: the output may end, drafts err

Allowance = Callable[[int, int], int]
"""(kind, tokens of text to catch up on first) -> most drafts of this kind that are worth their cost now."""


class Proposer(Protocol):
    """Guesses what a sequence says next."""

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        """Token ids that may follow the sequence's last one, as many as `allowance` says; none if there are none.

        What is proposed is of the kind that `allowance` was asked for last. `engine.draft.drafter` plans drafts here,
        and makes them when the step runs.
        """
        ...


@dataclass(slots=True)
class DraftRecord:
    """How drafts have fared in one sequence, and its tokens in a form that is quick to search.

    `kind` and `cost` are those of the latest drafts, `num_steps` counts the steps in which there could have been some.
    """

    buffer: NDArray[np.int64]
    num_tokens: int = 0
    num_steps: int = 0
    kind: int = MADE
    cost: float = 0.0
    trials: dict[int, DraftTrial] = field(default_factory=dict)

    def follow(self, token_ids: list[int]) -> NDArray[np.int64]:
        """The sequence's tokens as an array; only those that are new since the last call are copied."""
        count = len(token_ids)
        if count > len(self.buffer):
            grown = np.empty(2 * count, dtype=np.int64)
            grown[: self.num_tokens] = self.buffer[: self.num_tokens]
            self.buffer = grown
        self.buffer[self.num_tokens : count] = token_ids[self.num_tokens :]
        self.num_tokens = count
        return self.buffer[:count]


class Speculator:
    """Decides for whom drafting pays, asks the proposer, and learns from what was accepted.

    A draft that comes true with likelihood p and costs c (in steps of its sequence) pays if p > c; c is measured
    (`costs`), p estimated for each sequence and kind, from what is usual on. Of several, as many are made as give the
    most tokens in a time. Where it does not pay, the sequence pauses and later risks one draft.

    Estimates err, so what may be lost is bounded by what has happened: a sequence's drafts lose 1.2 steps on the whole
    (`DraftTrial.can_lose`), its risks 1 % of its steps more, and all risks together take 1 % of all steps. What a draft
    model has to read first is read where that is expected to pay twice over, or as such a risk.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        cost: float = 0.0,
        on_end: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        """`cost` of making a draft, relative to the model's own token, until it was measured; `on_end`: see `ended`."""
        self.ended = on_end
        """To be called with a sequence that has ended, for whatever reason."""
        self.config = config
        self.costs = DraftCosts(cost)
        self._proposer = proposer
        self._usual: dict[int, DraftTrial] = {}
        self._credit = _FIRST_CREDIT

    def propose(self, sequence: Sequence, most: int, num_running: int) -> tuple[int, ...]:
        """Drafts for a sequence that decodes, at most `most`; fewer where fewer pay."""
        if most < 1 or num_running > self.config.disable_by_batch_size:
            return ()
        self._credit = min(_MOST_CREDIT, self._credit + _PROBING)
        record = record_of(sequence)
        record.num_steps += 1

        def allowance(kind: int, num_to_catch_up: int) -> int:
            return min(most, self._num_worth(sequence, kind, num_to_catch_up, num_running))

        return self._proposer.propose(sequence, allowance)

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What came of the drafts of one step."""
        record = record_of(sequence)
        trial = self._trial(record, record.kind)
        came_true = trial.is_paid and num_accepted == num_drafted
        if came_true:  # a risk that has paid is none: the next one follows at once
            self._credit += num_accepted
        trial.learn(num_drafted, num_accepted, record.cost)
        self._usual_trial(record.kind).learn(num_drafted, num_accepted)
        pays = came_true or trial.share >= record.cost
        if self.config.least_acceptance is not None:
            trial.judge(pays=pays, step=record.num_steps, pause=self.config.pause_steps)
            return
        if came_true:
            trial.trust(record.cost)
        pays = pays and trial.can_lose >= record.cost
        # What is cheap is tried again soon: a text that begins to repeat itself should not wait.
        longest = math.ceil(record.cost / _PROBING)
        trial.judge(pays=pays, step=record.num_steps, pause=_FIRST_PAUSE, longest=longest)

    def _num_worth(self, sequence: Sequence, kind: int, num_to_catch_up: int, num_running: int) -> int:
        record, most = record_of(sequence), self.config.num_speculative_tokens
        trial, least = self._trial(record, kind), self.config.least_acceptance
        record.kind, record.cost = kind, self._cost(kind, num_running) if least is None else least
        if least is not None:
            return trial.num_likely(least, most) or int(record.num_steps >= trial.resume_at)
        num_best = trial.num_best(record.cost, most) if trial.can_lose >= record.cost else 0
        price = self.costs.to_catch_up(num_to_catch_up, num_running)
        if num_best and _saved(trial.share, record.cost, num_best, _num_to_come(sequence)) >= _SURE * price:
            return min(num_best, max(1, int(_PART * trial.can_lose / max(record.cost, 1e-9))))
        if record.num_steps < trial.resume_at:
            return 0
        return int(trial.is_paid or self._risks(sequence, num_to_catch_up, num_running))

    def _risks(self, sequence: Sequence, num_to_catch_up: int, num_running: int) -> bool:
        """Pays for a draft that probably will not; all that was read for it may be of use later."""
        record, most = record_of(sequence), self.config.num_speculative_tokens
        trial = self._trial(record, record.kind)
        price = record.cost + self.costs.to_catch_up(num_to_catch_up, num_running)
        # The prompt is read once, on all sequences' account: this one's might never suffice for that.
        num_own = min(num_to_catch_up, sequence.num_output_tokens)
        own = self.costs.to_catch_up(num_own, num_running)
        if price > self._credit or record.cost + own > trial.can_lose + _PROBING * record.num_steps:
            return False
        if _saved(1.0, record.cost, most, _num_to_come(sequence)) < price:
            return False
        self._credit -= price
        trial.gained -= own
        trial.is_paid = True  # it may take several steps to catch up
        return True

    def _cost(self, kind: int, num_running: int) -> float:
        check = self.costs.to_check(num_running)
        return check + self.costs.to_make(num_running) if kind == MADE else check

    def _trial(self, record: DraftRecord, kind: int) -> DraftTrial:
        trial = record.trials.get(kind)
        if trial is None:
            usual = self._usual_trial(kind).share
            weight, kept = (_USUAL_WEIGHT, _KEPT) if kind != MADE else (_USUAL_WEIGHT_OF_A_MODEL, _KEPT_OF_A_MODEL)
            trial = record.trials[kind] = DraftTrial.begin(usual, weight, kept)
        return trial

    def _usual_trial(self, kind: int) -> DraftTrial:
        if kind not in self._usual:
            hope = _HOPE_OF_A_MODEL if kind == MADE else _HOPE
            self._usual[kind] = DraftTrial.begin(hope, _HOPE_WEIGHT, _USUAL_KEPT)
        return self._usual[kind]


def _num_to_come(sequence: Sequence) -> float:
    """Tokens that the sequence is expected to say yet."""
    params, num_said = sequence.params, sequence.num_output_tokens
    left = math.inf if params.max_tokens is None else params.max_tokens - num_said
    return left if params.ignore_eos and left < math.inf else min(left, max(_USUAL_OUTPUT, num_said))


def _saved(share: float, cost: float, num_drafts: int, num_tokens: float) -> float:
    """Steps of as many tokens."""
    return num_tokens * (1 - 1 / speed_up(share, cost, num_drafts))


def record_of(sequence: Sequence) -> DraftRecord:
    """The sequence's own, made at the first call."""
    if sequence.drafts is None:
        sequence.drafts = DraftRecord(np.empty(max(_FIRST_SLOTS, 2 * sequence.num_tokens), dtype=np.int64))
    return sequence.drafts
