"""Texts of requests that have ended, for prompt lookup across requests: a suffix automaton for each owner. Pure.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), built token by token: a state stands
for all substrings that end at the same positions, `link` leads to the longest suffix that ends elsewhere too.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

SEPARATOR = -1
"""Between texts; no token, so that no match goes across."""


class SuffixAutomaton:
    """Of a growing text. About two states and half a kilobyte for each token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # behind an occurrence of the state's substrings
        self._last = 0

    def push(self, token_id: int) -> None:
        """Appends a token."""
        self.tokens.append(token_id)
        state = self._add_state({}, self._length[self._last] + 1, 0, len(self.tokens))
        before = self._last
        while before != -1 and token_id not in self._next[before]:
            self._next[before][token_id] = state
            before = self._link[before]
        if before != -1:
            after = self._next[before][token_id]
            if self._length[after] != self._length[before] + 1:
                after = self._split(before, token_id, after)
            self._link[state] = after
            self._end[after] = len(self.tokens)
        self._last = state

    def _split(self, before: int, token_id: int, after: int) -> int:
        """A state for the shorter ones of `after`'s substrings, which end at one position more from now on."""
        length = self._length[before] + 1
        shorter = self._add_state(dict(self._next[after]), length, self._link[after], self._end[after])
        while before != -1 and self._next[before].get(token_id) == after:
            self._next[before][token_id] = shorter
            before = self._link[before]
        self._link[after] = shorter
        return shorter

    def _add_state(self, following: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return len(self._next) - 1

    def walk(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """From the longest suffix of a text that stands here, as (state, length), to that with one token more.

        The automaton may have grown in between.
        """
        while state and length <= self._length[self._link[state]]:
            state = self._link[state]  # it was split
        while state and token_id not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token_id in self._next[state]:
            return self._next[state][token_id], length + 1
        return 0, 0

    def following(self, state: int, most: int) -> tuple[int, ...]:
        """What followed the state's substrings where they stood, at most to the end of that text."""
        start = self._end[state]
        found = self.tokens[start : start + most]
        return tuple(found[: found.index(SEPARATOR)] if SEPARATOR in found else found)


class RecentTexts:
    """Outputs by owner: nobody is shown what another one's requests said.

    Half of `max_tokens` is for an owner's latest texts: when they have grown to that they are forgotten, so that the
    next ones count; together all have `max_tokens`, and the owner who ended nothing for longest gives way.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._texts: OrderedDict[Hashable, SuffixAutomaton] = OrderedDict()

    def note(self, owner: Hashable, token_ids: Sequence[int]) -> None:
        """A text has ended."""
        most = self._max_tokens // 2
        texts = self._texts.get(owner)
        if texts is None or len(texts.tokens) + len(token_ids) > most:
            texts = self._texts[owner] = SuffixAutomaton()
        self._texts.move_to_end(owner)
        for token_id in token_ids[-most:]:
            texts.push(token_id)
        texts.push(SEPARATOR)
        while self.num_tokens > self._max_tokens and len(self._texts) > 1:
            self._texts.popitem(last=False)

    def of(self, owner: Hashable) -> SuffixAutomaton | None:
        return self._texts.get(owner)

    @property
    def num_tokens(self) -> int:
        return sum(len(texts.tokens) for texts in self._texts.values())
