"""Drafts for sequences that may not draw every token: what their grammar forces, and nothing that it forbids."""

from engine.sequence import Sequence
from engine.speculation import Allowance, Proposer
from pagewire.grammar import GrammarError

FORCED = -1
"""The kind of drafts that a grammar leaves no other text for. They may still be cut into other tokens."""


class PermittedDrafts:
    """Another proposer's drafts, up to the first that could not be drawn; before those, forced text."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        """See `engine.speculation.Proposer`. None where the grammar is at its end: the request will be told."""
        if not sequence.is_constrained:
            return self._proposer.propose(sequence, allowance)
        output = sequence.output_token_ids
        try:
            constraint = sequence.constrain(self._vocab_size)
            forced = constraint.forced(output)
            most = allowance(FORCED, 0) if forced else 0
            if most:
                return tuple(forced[:most])
            drafts = self._proposer.propose(sequence, allowance)
            return drafts[: constraint.num_permitted(output, drafts)] if drafts else ()
        except GrammarError:
            return ()
