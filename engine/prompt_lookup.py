"""Drafts out of the sequence's own text: what followed its last tokens where they stood before."""

from typing import NamedTuple

import numpy as np

from engine.sequence import Sequence
from engine.speculation import Allowance, record_of


class Match(NamedTuple):
    """The last `length` tokens stand before position `start`, too."""

    start: int
    length: int


class NgramProposer:
    """Prompt lookup: the longest and latest match; its length is the drafts' kind, since longer ones come true oftener.

    Where the match overlaps its own continuation (a repetition), the draft goes on with the period.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        """See `engine.speculation.Proposer`."""
        return self.continue_from(sequence, self.find(sequence), allowance)

    def continue_from(self, sequence: Sequence, match: Match | None, allowance: Allowance) -> tuple[int, ...]:
        """The drafts of a match, which `find` gave."""
        if match is None or match.length < self._shortest:
            return ()
        tokens = record_of(sequence).follow(sequence.token_ids)
        period = len(tokens) - match.start
        return tuple(int(tokens[match.start + i % period]) for i in range(allowance(match.length, 0)))

    def find(self, sequence: Sequence) -> Match | None:
        tokens = record_of(sequence).follow(sequence.token_ids)
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length = 1
        while length < self._longest and len(ends):
            before = ends[ends >= length]
            longer = before[tokens[before - length] == tokens[last - length]] if last >= length else before[:0]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return Match(int(ends[-1]) + 1, length) if len(ends) else None
