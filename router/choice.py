"""One choice's output: tokens of two workers put in order by index, made into text, ended where it must end."""

from collections.abc import Sequence

from pagewire.text.detokenizer import Detokenizer
from pagewire.text.stop import StopMatcher
from router.request import FinishReason, Piece, Token


class ChoiceOutput:
    """Pure. Tokens may come in any order and more than once; whatever comes after the end is dropped.

    The first `min_tokens` tokens cannot complete a stop string. A token that a worker marks STOP (end of sequence, a
    stop token id) is output as an id; as text only if `show_stop_token`. `output_token_ids` are facts already, and in
    no piece.
    """

    def __init__(
        self,
        choice: int,
        detokenizer: Detokenizer,
        stop: StopMatcher,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        show_stop_token: bool = False,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        self.choice = choice
        self.output_token_ids: list[int] = list(output_token_ids)
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stop = stop
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._show_stop_token = show_stop_token
        self._early: dict[int, Token] = {}

    def contradicts(self, token: Token) -> bool:
        """True if another token is a fact at that position: whoever computed this one is on another path."""
        index = token.index
        return index < len(self.output_token_ids) and self.output_token_ids[index] != token.token_id

    def push(self, token: Token) -> Piece | None:
        """New output, if the token (and earlier ones that it lets through) brings any."""
        due = len(self.output_token_ids)
        if self.finish_reason is not None or token.index < due:
            return None
        if token.index > due:
            self._early.setdefault(token.index, token)
            return None
        piece = Piece(self.choice, due)
        following: Token | None = token
        while following is not None and self.finish_reason is None:
            self._append(following, piece)
            following = self._early.pop(len(self.output_token_ids), None)
        return piece

    def forget_early(self) -> None:
        """Drops tokens that wait for earlier ones."""
        self._early.clear()

    def _append(self, token: Token, piece: Piece) -> None:
        self.output_token_ids.append(token.token_id)
        piece.token_ids.append(token.token_id)
        if token.logprobs is not None:
            piece.logprobs.append(token.logprobs)
        finish = token.finish_reason
        count = len(self.output_token_ids)
        if finish is None and count >= self._max_tokens:
            finish = FinishReason.LENGTH
        hidden = finish is FinishReason.STOP and not self._show_stop_token
        text = "" if hidden else self._detokenizer.push(token.token_id)
        if finish is not None:
            text += self._detokenizer.flush()
        if count <= self._min_tokens:
            piece.text += self._stop.push_unchecked(text)
        else:
            checked = self._stop.push(text)
            piece.text += checked.text
            if checked.stop is not None:
                finish, piece.stop_reason = FinishReason.STOP, checked.stop
        if finish is not None:
            piece.text += self._stop.flush()
            piece.finish_reason = self.finish_reason = finish
            self._early.clear()
