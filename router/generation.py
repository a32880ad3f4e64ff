"""The output side of one request: choices in the making, and an outbox that a slow reader cannot make grow."""

import asyncio
from collections.abc import Callable, Sequence

from router.choice import ChoiceOutput
from router.request import ChoiceSoFar, Logprobs, Piece, PromptLogprobs, Token

_PROMPT_LOGPROBS_AT_ONCE = 1024


class Generation:
    """Where tokens of any worker go in (`accept`, a plain call) and pieces come out (`take`).

    Pieces of a choice that wait in the outbox are merged, so it holds at most one per choice however slowly the client
    reads, and whoever calls `accept` (a session serving many requests) never waits.
    """

    def __init__(self, choices: Sequence[ChoiceOutput], *, num_prompt_logprobs: int = 0) -> None:
        """`num_prompt_logprobs` of the prompt's tokens (all but the first) are wanted."""
        self.choices = tuple(choices)
        self._num_prompt_logprobs = num_prompt_logprobs
        self._prompt_logprobs: list[Logprobs] = []
        self.num_completion_tokens = sum(len(choice.output_token_ids) for choice in self.choices)
        self._num_unfinished = len(self.choices)
        self._on_finished: Callable[[], None] = lambda: None
        self._outbox: dict[int, Piece] = {}
        self._reader: asyncio.Future[None] | None = None  # it waits
        self._closed = False

    def contradicts(self, token: Token) -> bool:
        """True if the client has another token at that position already, and wants more of that choice."""
        if not 0 <= token.choice < len(self.choices):
            return False
        choice = self.choices[token.choice]
        return choice.finish_reason is None and choice.contradicts(token)

    def accept(self, token: Token) -> None:
        """A token from a worker; unknown choices and duplicates are dropped."""
        if not 0 <= token.choice < len(self.choices):
            return
        choice = self.choices[token.choice]
        piece = choice.push(token)
        if piece is None:
            return
        self.num_completion_tokens += len(piece.token_ids)
        waiting = self._outbox.get(token.choice)
        if waiting is None:
            self._outbox[token.choice] = piece
        else:
            waiting.extend(piece)
        if piece.finish_reason is not None:
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self._on_finished()
        self._wake()

    def accept_prompt_logprobs(self, start: int, entries: Sequence[Logprobs]) -> None:
        """Of the prompt's tokens from `start` (at least 1) on; those that are known stay."""
        num_known = len(self._prompt_logprobs)
        if 1 <= start <= num_known + 1:
            room = self._num_prompt_logprobs - num_known
            self._prompt_logprobs += entries[num_known + 1 - start :][:room]
            self._wake()

    async def take_prompt_logprobs(self, prompt_token_ids: Sequence[int]) -> list[PromptLogprobs]:
        """Waits for all that are wanted, in messages of a bounded size; fewer, if the request has ended before."""
        while len(self._prompt_logprobs) < self._num_prompt_logprobs and not self._closed:
            await self._change()
        messages = []
        for start in range(1, 1 + len(self._prompt_logprobs), _PROMPT_LOGPROBS_AT_ONCE):
            part = self._prompt_logprobs[start - 1 : start - 1 + _PROMPT_LOGPROBS_AT_ONCE]
            messages.append(PromptLogprobs(start, tuple(prompt_token_ids[start : start + len(part)]), tuple(part)))
        return messages

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Some were lost with their worker, after output was a fact."""
        return len(self._prompt_logprobs) < self._num_prompt_logprobs

    def on_finished(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, when the last choice is finished."""
        self._on_finished = callback

    @property
    def is_finished(self) -> bool:
        """True when every choice is finished."""
        return self._num_unfinished == 0

    @property
    def has_output(self) -> bool:
        """True once any token is a fact."""
        return self.num_completion_tokens > 0

    def so_far(self) -> dict[int, ChoiceSoFar]:
        """State for a worker that continues; empty while there is none."""
        if not self.has_output:
            return {}
        return {
            choice.choice: ChoiceSoFar(tuple(choice.output_token_ids), choice.finish_reason is not None)
            for choice in self.choices
        }

    def forget_early(self) -> None:
        """Drops tokens that came ahead of their turn: the worker that would close the gap is lost."""
        for choice in self.choices:
            choice.forget_early()

    def close(self) -> None:
        """No more tokens will come; `take` returns what is left and then nothing."""
        self._closed = True
        self._wake()

    async def take(self) -> list[Piece]:
        """Waits for output; empty means the end."""
        while not self._outbox and not self._closed:
            await self._change()
        pieces = list(self._outbox.values())
        self._outbox.clear()
        return pieces

    async def _change(self) -> None:
        """Waits until there is more; one reader at a time."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
