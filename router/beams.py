"""Beam search over workers that know none: each step asks for the likeliest tokens after every beam. Pure.

    beams ──(a choice each, with its output so far)──► worker ──likeliest tokens──► `advance` ──► beams, finished

The rules are those of Hugging Face's `generate(num_beams=…)`: of all beams' continuations the (1 + number of EOS
tokens) times num_beams likeliest are looked at. Those that end count as finished if they are among the first num_beams;
the best num_beams of the others go on. A finished output's score is its log-probability / length ** length_penalty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.request import BeamSearch


@dataclass(frozen=True, slots=True)
class Beam:
    """An output in the making; `logprob` is the sum over its tokens."""

    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class Finished:
    """An output that has ended, and its length-penalized score."""

    token_ids: tuple[int, ...]
    score: float


class BeamState:
    """One search. Outputs end at `eos_token_ids` or with `max_tokens` tokens."""

    def __init__(self, search: BeamSearch, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self.beams: list[Beam] = [Beam((), 0.0)]
        self.finished: list[Finished] = []
        self.is_done = False
        self._search = search
        self._max_tokens = max_tokens
        self._eos_token_ids = eos_token_ids
        self._can_improve = True

    @property
    def num_candidates(self) -> int:
        """Continuations that a step looks at; as many of each beam suffice."""
        return num_candidates(self._search.num_beams, len(self._eos_token_ids))

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Takes (token id, log-probability) of each beam's likeliest next tokens."""
        num_beams = self._search.num_beams
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, found in zip(self.beams, likeliest, strict=True)
            for token_id, logprob in found
        ]
        candidates.sort(key=lambda beam: -beam.logprob)  # stable: of equals the better beam's
        candidates = candidates[: self.num_candidates]
        self._finish([beam for beam in candidates[:num_beams] if self._ends(beam)])
        self.beams = [beam for beam in candidates if not self._ends(beam)][:num_beams]
        is_full = len(self.finished) == num_beams
        self._can_improve = self._can_improve and (not is_full or self._may_improve())
        is_enough = is_full and self._search.early_stopping is True
        self.is_done = not self.beams or is_enough or not self._can_improve

    def _ends(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._eos_token_ids or len(beam.token_ids) >= self._max_tokens

    def _finish(self, ended: Sequence[Beam]) -> None:
        is_full = len(self.finished) == self._search.num_beams
        if is_full and self._search.early_stopping is True:
            return
        penalty = self._search.length_penalty
        new = [Finished(beam.token_ids, beam.logprob / len(beam.token_ids) ** penalty) for beam in ended]
        ranked = sorted([*self.finished, *new], key=lambda each: -each.score)
        self.finished = ranked[: self._search.num_beams]

    def _may_improve(self) -> bool:
        """Whether the best beam could still beat the worst finished output, by the rule that was asked for."""
        if not self.beams:
            return False
        penalty, length = self._search.length_penalty, len(self.beams[0].token_ids)
        if self._search.early_stopping is None and penalty > 0:
            length = self._max_tokens
        best: float = self.beams[0].logprob / length**penalty
        return best > self.finished[-1].score


def num_candidates(num_beams: int, num_eos_tokens: int) -> int:
    """Continuations that a step looks at: enough that num_beams can go on, whatever ends."""
    return max(2, 1 + num_eos_tokens) * num_beams
