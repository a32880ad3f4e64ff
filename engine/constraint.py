"""Which tokens one sequence may draw next: allowed_token_ids, bad_words and the grammar. No torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.request import EngineRequest
from pagewire.grammar import Grammar, GrammarError, GrammarState
from pagewire.sampling import SamplingParams

Mask = NDArray[np.bool_]


class Constraint:
    """Of one sequence. A function of its output's tokens: what it keeps only saves work.

    Guesses are read by a state of their own: what one of them does to a grammar (a step that is too complex, which a
    matcher never forgets) must not reach what is drawn.
    """

    def __init__(self, request: EngineRequest, vocab_size: int) -> None:
        self._params: SamplingParams = request.params
        self._grammar: Grammar | None = None
        self._state: GrammarState | None = None
        self._guesses: GrammarState | None = None
        self._allowed: Mask | None = None
        if request.params.structured_output is not None:
            if request.grammar is None:
                raise GrammarError("it was not compiled")  # whoever adds requests to an engine does that first
            self._grammar = request.grammar
            self._state = request.grammar.start()
        if request.params.allowed_token_ids:
            self._allowed = np.zeros(vocab_size, dtype=np.bool_)
            self._allowed[np.asarray(request.params.allowed_token_ids, dtype=np.int64)] = True
        self._vocab_size = vocab_size

    def mask(self, output_token_ids: Sequence[int]) -> Mask:
        """True where a token may follow the output: [vocab_size]. Raises GrammarError."""
        if self._state is not None:
            return self._state.allowed(output_token_ids)
        return self._mask(output_token_ids, ())

    def mask_of_guess(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Mask:
        """As `mask`, if the drafts came true. Raises GrammarError."""
        guesses = self._guessing()
        if guesses is not None:
            return guesses.allowed(output_token_ids, draft_token_ids)
        return self._mask(output_token_ids, draft_token_ids)

    def num_permitted(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> int:
        """So many of the drafts, from the first on, could be drawn after the output. Raises GrammarError."""
        guesses = self._guessing()
        if guesses is not None:
            return guesses.num_allowed(output_token_ids, draft_token_ids)
        for i, draft in enumerate(draft_token_ids):
            if self._allowed is not None and not self._allowed[draft]:
                return i
            for bad_word in self._params.bad_words_token_ids:
                if draft == bad_word[-1] and _ends_before_last(bad_word, output_token_ids, draft_token_ids[:i]):
                    return i
        return len(draft_token_ids)

    def forced(self, output_token_ids: Sequence[int]) -> list[int]:
        """Tokens of the text that the grammar forces next; none without a grammar. Raises GrammarError."""
        guesses = self._guessing()
        return [] if guesses is None else guesses.forced(output_token_ids)

    def _guessing(self) -> GrammarState | None:
        if self._guesses is None and self._grammar is not None:
            self._guesses = self._grammar.start()
        return self._guesses

    def _mask(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Mask:
        allowed = np.ones(self._vocab_size, dtype=np.bool_) if self._allowed is None else self._allowed.copy()
        for bad_word in self._params.bad_words_token_ids:
            if _ends_before_last(bad_word, output_token_ids, draft_token_ids):
                allowed[bad_word[-1]] = False
        return allowed


def _ends_before_last(word: Sequence[int], output_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> bool:
    """Whether output and drafts end with all of the word but its last token."""
    length = len(word) - 1
    if not length:
        return True
    tail = [*output_token_ids[-length:], *draft_token_ids][-length:]
    return tail == list(word[:-1])
