"""One request's way back from the engine to its router."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from engine.request import PromptLogprobs, TokenOutput
from pagewire.errors import PagewireError


@dataclass(frozen=True, slots=True)
class Progress:
    """A chunk was computed."""

    num_computed_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """Prefill is over: the first token of each choice."""

    tokens: tuple[TokenOutput, ...]
    num_cached_tokens: int


class PrefillStream:
    """Events of one request. `ticket` is empty without hand-off; `ended` is set once the reader has the last event."""

    def __init__(self, request_id: str, ticket: bytes, trace_id: str = "") -> None:
        self.request_id = request_id
        self.trace_id = trace_id
        self.ticket = ticket
        self.ended = False
        self.fetching: asyncio.Task[None] | None = None  # until the engine has the request
        self.num_fetched_tokens = 0
        self.num_passed_over_tokens = 0  # others are said to hold them, and nobody was asked
        self._events: deque[Progress | PromptLogprobs | Done | PagewireError] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Progress | PromptLogprobs | Done | PagewireError) -> None:
        """Progress that nobody has read yet is replaced, so a slow reader costs no memory."""
        if isinstance(event, Progress) and self._events and isinstance(self._events[-1], Progress):
            self._events.pop()
        self._events.append(event)
        self._arrived.set()

    async def events(self) -> AsyncGenerator[Progress | PromptLogprobs | Done, None]:
        """Ends after Done; raises the error that ended the request."""
        while not self.ended:
            while self._events:
                event = self._events.popleft()
                self.ended = not isinstance(event, Progress | PromptLogprobs)
                if isinstance(event, PagewireError):
                    raise event
                yield event
            if not self.ended:
                self._arrived.clear()
                await self._arrived.wait()
