"""best_of: of all choices that were drawn, the best few by mean log-probability, as OpenAI's API has it."""

from router.request import GenerateCall, Piece


class Ranking:
    """Keeps the output of every choice until all have ended."""

    def __init__(self, num_kept: int, *, keep_logprobs: bool) -> None:
        self._num_kept = num_kept
        self._keep_logprobs = keep_logprobs
        self._choices: dict[int, Piece] = {}

    def add(self, piece: Piece) -> None:
        """New output of one choice; it has log-probabilities."""
        if piece.choice in self._choices:
            self._choices[piece.choice].extend(piece)
        else:
            self._choices[piece.choice] = piece

    def best(self) -> list[Piece]:
        """The best choices, best first, numbered anew; of equals the one that was drawn first."""
        ranked = sorted(self._choices.values(), key=lambda piece: (-_mean_logprob(piece), piece.choice))
        kept = ranked[: self._num_kept]
        for number, piece in enumerate(kept):
            piece.choice = number
            if not self._keep_logprobs:
                piece.logprobs = []
        return kept


def _mean_logprob(piece: Piece) -> float:
    return sum(item.logprob for item in piece.logprobs) / max(1, len(piece.logprobs))


def ranking_of(call: GenerateCall) -> Ranking | None:
    """What ranks the call's choices; None if all of them are wanted."""
    if call.best_of is None:
        return None
    return Ranking(call.sampling.n, keep_logprobs=call.sampling.logprobs is not None)
