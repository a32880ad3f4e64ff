"""Speculative decoding: guesses of the next tokens, which the target model checks several at a time.

Exact by construction (DESIGN §4): at every position the target draws the token it would have drawn anyway, with the
same noise; a draft is accepted if and only if it equals that token. A guess can cost time, never change a token.
Proposing is pure: no clock, no device.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence
from pagewire.speculative import SpeculativeConfig

_DECAY = 0.75
_LEAST_ACCEPTANCE = 0.25
_USUAL_DECAY = 0.9
_FIRST_SLOTS = 256


class Proposer(Protocol):
    """Guesses what a sequence says next."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Up to `most` token ids that may follow the sequence's last one; none if there is no good guess.

        `engine.draft.drafter` plans them here, and makes them when the step runs.
        """
        ...


@dataclass(slots=True)
class DraftRecord:
    """How drafts have fared in one sequence, and its tokens in a form that is quick to search.

    `acceptance` is the moving share of drafted tokens that were accepted; `pause` counts the steps without drafts that
    are still to come, since lately they did not pay.
    """

    buffer: NDArray[np.int64]
    num_tokens: int = 0
    acceptance: float = 1.0
    pause: int = 0

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
    """Decides for whom drafting pays, asks the proposer, and learns from what was accepted."""

    def __init__(self, config: SpeculativeConfig, proposer: Proposer | None = None, cost: float = 0.0) -> None:
        """`cost` of a draft, relative to the model's own token.

        k drafts of which the share a comes true make 1 + k a tokens in the time of 1 + k cost: they pay if a > cost.
        Where drafts cost something and of late did not pay in other sequences, a new one starts with a pause.
        """
        self.config = config
        least = config.least_acceptance
        self._least_acceptance = max(_LEAST_ACCEPTANCE, min(1.0, cost)) if least is None else least
        self._is_free = not cost
        self._usual_acceptance = 1.0
        self._proposer = proposer or NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)

    def propose(self, sequence: Sequence, most: int, num_running: int) -> tuple[int, ...]:
        """Drafts for a sequence that decodes, at most `most`; shorter ones where fewer were accepted of late."""
        if most < 1 or num_running > self.config.disable_by_batch_size:
            return ()
        is_new = sequence.drafts is None
        record = _record(sequence)
        if is_new and not self._is_free and self._usual_acceptance < self._least_acceptance:
            self._pause(record)
        if record.pause:
            record.pause -= 1
            return ()
        worth_it = 1 + round(record.acceptance * (self.config.num_speculative_tokens - 1))
        return self._proposer.propose(sequence, min(most, worth_it))

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What came of the drafts of one step."""
        record, share = _record(sequence), num_accepted / num_drafted
        record.acceptance = _DECAY * record.acceptance + (1 - _DECAY) * share
        self._usual_acceptance = _USUAL_DECAY * self._usual_acceptance + (1 - _USUAL_DECAY) * share
        if record.acceptance < self._least_acceptance:
            self._pause(record)

    def _pause(self, record: DraftRecord) -> None:
        record.pause = self.config.pause_steps
        record.acceptance = self._least_acceptance  # then it gets one more chance


class NgramProposer:
    """Prompt lookup: what followed the last tokens where they stood before, the longest and latest match.

    Where the match overlaps its own continuation (a repetition), the draft goes on with the period.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        tokens = _record(sequence).follow(sequence.token_ids)
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length = 1
        while length < self._longest and len(ends):
            before = ends[ends >= length]
            longer = before[tokens[before - length] == tokens[last - length]] if last >= length else before[:0]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends) or length < self._shortest:
            return ()
        start = int(ends[-1]) + 1
        period = len(tokens) - start
        return tuple(int(tokens[start + i % period]) for i in range(most))


def _record(sequence: Sequence) -> DraftRecord:
    if sequence.drafts is None:
        sequence.drafts = DraftRecord(np.empty(max(_FIRST_SLOTS, 2 * sequence.num_tokens), dtype=np.int64))
    return sequence.drafts
