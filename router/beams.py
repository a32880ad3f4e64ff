"""Beam search over workers that know none: each step asks for the likeliest tokens after every beam. Pure.

    beams ──(a choice each, with its output so far)──► worker ──likeliest tokens──► `advance` ──► beams, finished

The rules are those of Hugging Face's `generate(num_beams=…)`: of all beams' continuations the (1 + number of EOS
tokens) times num_beams likeliest are looked at. Those that end count as finished if they are among the first num_beams;
the best num_beams of the others go on. A finished output's score is its log-probability / length ** length_penalty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.text.detokenizer import Detokenizer
from pagewire.text.stop import StopMatcher
from router.request import BeamSearch

Likeliest = tuple[tuple[int, float], ...]
"""(token id, log-probability) of the likeliest next tokens, best first."""


class BeamText:
    """The text of an output in the making, as far as it is needed to know whether a stop string has ended it."""

    def __init__(self, detokenizer: Detokenizer, stop: StopMatcher, min_tokens: int, num_tokens: int = 0) -> None:
        self.is_stopped = False
        self._detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = num_tokens

    def after(self, token_id: int) -> "BeamText":
        """The same with one more token; a stop string before `min_tokens` does not count."""
        num_tokens = self._num_tokens + 1
        longer = BeamText(self._detokenizer.copy(), self._stop.copy(), self._min_tokens, num_tokens)
        text = longer._detokenizer.push(token_id)
        if num_tokens <= self._min_tokens:
            longer._stop.push_unchecked(text)
        else:
            longer.is_stopped = longer._stop.push(text).stop is not None
        return longer


@dataclass(frozen=True, slots=True)
class Beam:
    """An output in the making; `logprob` is the sum over its tokens, `likeliest` what each was chosen from."""

    token_ids: tuple[int, ...]
    logprob: float
    likeliest: tuple[Likeliest, ...] = ()
    text: BeamText | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """An output that has ended, and its length-penalized score."""

    token_ids: tuple[int, ...]
    score: float
    likeliest: tuple[Likeliest, ...] = ()


class BeamState:
    """One search. Outputs end at `end_token_ids`, with `max_tokens` tokens or, given their `text`, at a stop string."""

    def __init__(
        self, search: BeamSearch, max_tokens: int, end_token_ids: frozenset[int], text: BeamText | None = None
    ) -> None:
        self.beams: list[Beam] = [Beam((), 0.0, text=text)]
        self.finished: list[Finished] = []
        self.is_done = False
        self._search = search
        self._max_tokens = max_tokens
        self._end_token_ids = end_token_ids
        self._can_improve = True

    @property
    def num_candidates(self) -> int:
        """Continuations that a step looks at; as many of each beam suffice."""
        return num_candidates(self._search.num_beams, len(self._end_token_ids))

    def advance(self, likeliest: Sequence[Likeliest]) -> None:
        """Takes what may follow each beam."""
        num_beams = self._search.num_beams
        found = [
            (beam.logprob + logprob, number, token_id)
            for number, beam in enumerate(self.beams)
            for token_id, logprob in likeliest[number][: self.num_candidates]
        ]
        found.sort(key=lambda each: -each[0])  # stable: of equals the better beam's
        candidates = [
            _longer(self.beams[number], token_id, logprob, likeliest[number])
            for logprob, number, token_id in found[: self.num_candidates]
        ]
        self._finish([beam for beam in candidates[:num_beams] if self._ends(beam)])
        self.beams = [beam for beam in candidates if not self._ends(beam)][:num_beams]
        is_full = len(self.finished) == num_beams
        self._can_improve = self._can_improve and (not is_full or self._may_improve())
        is_enough = is_full and self._search.early_stopping is True
        self.is_done = not self.beams or is_enough or not self._can_improve

    def _ends(self, beam: Beam) -> bool:
        if beam.token_ids[-1] in self._end_token_ids or len(beam.token_ids) >= self._max_tokens:
            return True
        return beam.text is not None and beam.text.is_stopped

    def _finish(self, ended: Sequence[Beam]) -> None:
        is_full = len(self.finished) == self._search.num_beams
        if is_full and self._search.early_stopping is True:
            return
        penalty = self._search.length_penalty
        new = [
            Finished(beam.token_ids, beam.logprob / len(beam.token_ids) ** penalty, beam.likeliest) for beam in ended
        ]
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


def _longer(beam: Beam, token_id: int, logprob: float, likeliest: Likeliest) -> Beam:
    text = None if beam.text is None else beam.text.after(token_id)
    return Beam((*beam.token_ids, token_id), logprob, (*beam.likeliest, likeliest), text)


def num_candidates(num_beams: int, num_end_tokens: int) -> int:
    """Continuations that a step looks at: enough that num_beams can go on, whichever token ends."""
    return max(2, 1 + num_end_tokens) * num_beams
