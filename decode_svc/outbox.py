"""What one router has to be told next: every step adds to the open batch, the writer takes it whole.

A writer that keeps up sends one message per step; one that lags sends several steps in one. One that lags too far is
cut off, since nothing here may grow without bound.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from engine.request import PromptLogprobs, TokenOutput
from pagewire.errors import PagewireError, ResourceExhausted

MAX_PENDING_TOKENS = 1 << 16


@dataclass(slots=True)
class Batch:
    """Each entry is, or starts with, the handle of its request."""

    accepted: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[tuple[int, TokenOutput]] = field(default_factory=list)
    failures: list[tuple[int, PagewireError]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.accepted or self.tokens or self.failures or self.ended or self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has the request; so many of its tokens needed no computing."""

    num_cached_tokens: int


class Outbox:
    """Filled by the worker, emptied by one writer; both on the same event loop."""

    def __init__(self, max_pending_tokens: int = MAX_PENDING_TOKENS) -> None:
        self._batch = Batch()
        self._max_pending_tokens = max_pending_tokens
        self._ready = asyncio.Event()
        self._overflowed = False
        self._closed = False

    def accept(self, handle: int, num_cached_tokens: int) -> None:
        self._batch.accepted.append((handle, num_cached_tokens))

    def add(self, handle: int, token: TokenOutput) -> None:
        if len(self._batch.tokens) < self._max_pending_tokens:
            self._batch.tokens.append((handle, token))
        else:
            self._overflowed = True

    def add_prompt_logprobs(self, handle: int, found: PromptLogprobs) -> None:
        self._batch.prompt_logprobs.append((handle, found))

    def fail(self, handle: int, error: PagewireError) -> None:
        self._batch.failures.append((handle, error))

    def end(self, handle: int) -> None:
        """The request has sent its last token."""
        self._batch.ended.append(handle)

    def flush(self) -> None:
        """A step is over: what was added may go out."""
        if self._overflowed or not self._batch.is_empty:
            self._ready.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._ready.set()

    async def take(self) -> Batch | None:
        """The next batch; None after `close` and the last one. Raises ResourceExhausted if the reader is too slow."""
        while True:
            if self._overflowed:
                raise ResourceExhausted(
                    f"the reader is too slow: {self._max_pending_tokens} tokens wait for it", subject="session"
                )
            if self._ready.is_set() and not self._batch.is_empty:
                batch, self._batch = self._batch, Batch()
                if not self._closed:
                    self._ready.clear()
                return batch
            if self._closed:
                return None
            await self._ready.wait()

    async def outputs(self) -> AsyncGenerator[Accepted | PromptLogprobs | TokenOutput]:
        """All that comes of the only request that uses this outbox, until it has ended. Raises why it failed."""
        while (batch := await self.take()) is not None:
            for _, num_cached_tokens in batch.accepted:
                yield Accepted(num_cached_tokens)
            for _, found in batch.prompt_logprobs:
                yield found
            for _, token in batch.tokens:
                yield token
            for _, error in batch.failures:
                raise error
            if batch.ended:
                return
