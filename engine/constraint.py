"""Which tokens one sequence may draw next: allowed_token_ids, bad_words and the grammar. No torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.request import EngineRequest
from pagewire.grammar import GrammarError, GrammarState
from pagewire.sampling import SamplingParams

Mask = NDArray[np.bool_]


class Constraint:
    """Of one sequence. A function of its output's tokens: what it keeps only saves work."""

    def __init__(self, request: EngineRequest, vocab_size: int) -> None:
        self._params: SamplingParams = request.params
        self._grammar: GrammarState | None = None
        self._allowed: Mask | None = None
        if request.params.structured_output is not None:
            if request.grammar is None:
                raise GrammarError("it was not compiled")  # whoever adds requests to an engine does that first
            self._grammar = request.grammar.start()
        if request.params.allowed_token_ids:
            self._allowed = np.zeros(vocab_size, dtype=np.bool_)
            self._allowed[np.asarray(request.params.allowed_token_ids, dtype=np.int64)] = True
        self._vocab_size = vocab_size

    def mask(self, output_token_ids: Sequence[int]) -> Mask:
        """True where a token may follow the output: [vocab_size]. Raises GrammarError."""
        if self._grammar is not None:
            return self._grammar.allowed(output_token_ids)
        allowed = np.ones(self._vocab_size, dtype=np.bool_) if self._allowed is None else self._allowed.copy()
        for *head, last in self._params.bad_words_token_ids:
            if not head or list(output_token_ids[-len(head) :]) == head:
                allowed[last] = False
        return allowed
