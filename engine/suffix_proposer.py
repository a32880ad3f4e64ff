"""Drafts out of the sequence's own text and of what its owner's latest requests were answered."""

from collections.abc import Hashable
from dataclasses import dataclass

from engine.prompt_lookup import NgramProposer
from engine.recent_texts import RecentTexts, SuffixAutomaton
from engine.sequence import Sequence
from engine.speculation import Allowance

RECENT = 1000
"""Added to a match's length: the kind of drafts out of other requests' texts."""

_LONGEST = 16  # or the shortest that counts, if that is longer
_MOST_READ_AT_ONCE = 64  # tokens of a text that are walked through at first: longer matches tell nothing more


@dataclass(slots=True)
class _Cursor:
    """How far a sequence's text has been walked through its owner's texts, and the longest suffix found there."""

    texts: SuffixAutomaton
    num_read: int
    state: int = 0
    length: int = 0


class SuffixProposer:
    """The longer match counts; of equals the own text's."""

    def __init__(self, shortest: int, recent: RecentTexts) -> None:
        self._shortest = shortest
        self._recent = recent
        self._longest = max(shortest, _LONGEST)
        self._own = NgramProposer(shortest, self._longest)
        self._cursors: dict[Sequence, _Cursor] = {}

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        """See `engine.speculation.Proposer`."""
        match = self._own.find(sequence)
        cursor = self._read(sequence)
        if cursor is not None:
            length = min(cursor.length, self._longest)
            if length >= self._shortest and (match is None or length > match.length):
                drafts = cursor.texts.following(cursor.state, most) if (most := allowance(RECENT + length, 0)) else ()
                if drafts:
                    return drafts
        return self._own.continue_from(sequence, match, allowance)

    def ended(self, sequence: Sequence) -> None:
        """Its text is there for its owner's other requests."""
        self._cursors.pop(sequence, None)
        if output := sequence.output_token_ids:
            self._recent.note(_owner(sequence), output)

    def _read(self, sequence: Sequence) -> _Cursor | None:
        texts = self._recent.of(_owner(sequence))
        if texts is None:
            self._cursors.pop(sequence, None)  # it would keep texts that are forgotten
            return None
        cursor = self._cursors.get(sequence)
        if cursor is None or cursor.texts is not texts:
            first = max(0, sequence.num_tokens - _MOST_READ_AT_ONCE)
            cursor = self._cursors[sequence] = _Cursor(texts, first)
        for token_id in sequence.token_ids[cursor.num_read :]:
            cursor.state, cursor.length = texts.walk(cursor.state, cursor.length, token_id)
        cursor.num_read = sequence.num_tokens
        return cursor


def _owner(sequence: Sequence) -> Hashable:
    """Whose texts may show: as strict as the prefix cache's salt, and by tenant."""
    request = sequence.request
    return request.tenant, request.cache_salt, request.adapter_key
