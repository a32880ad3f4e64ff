"""Abort by the client's own request id: the stream of that request ends by itself, as its last message says.

It ends requests of the caller who asks for it and nobody else's.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from pagewire.vllm_engine.caller import Caller

T = TypeVar("T")


class Aborts:
    """Requests that run. Ids are the clients' own, so several of one caller may share one; an abort ends them all."""

    def __init__(self) -> None:
        self._running: dict[tuple[Caller, str], list[asyncio.Event]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))

    @contextmanager
    def watch(self, caller: Caller, request_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the caller aborts the request."""
        aborted, name = asyncio.Event(), (caller, request_id)
        self._running.setdefault(name, []).append(aborted)
        try:
            yield aborted
        finally:
            self._running[name].remove(aborted)
            if not self._running[name]:
                del self._running[name]

    def abort(self, caller: Caller, request_ids: Iterable[str]) -> None:
        """Ids that the caller does not have are fine: their requests have ended."""
        for request_id in request_ids:
            for aborted in self._running.get((caller, request_id), ()):
                aborted.set()


async def until(aborted: asyncio.Event, outputs: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The outputs up to the abort; closes `outputs` in any case, and before it ends."""
    waiting = asyncio.ensure_future(aborted.wait())
    try:
        async with aclosing(outputs):
            while not aborted.is_set():
                following = asyncio.ensure_future(anext(outputs, None))
                try:
                    await asyncio.wait((following, waiting), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    following.cancel()  # of no effect if it is done
                    await asyncio.gather(following, return_exceptions=True)
                if following.cancelled() or (output := following.result()) is None:
                    return
                yield output
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
