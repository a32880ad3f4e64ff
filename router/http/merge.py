"""Several streams as one, each item with the number of its stream; used for requests with a list of prompts."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Numbered(Generic[T]):
    """An item and the stream it came from."""

    stream: int
    item: T


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[Numbered[T]]:
    """All items as they come. The first error ends everything; so does closing it. Streams wait for a slow reader."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield Numbered(0, item)
        return
    queue: asyncio.Queue[Numbered[T | _End]] = asyncio.Queue(maxsize=1)

    async def pump(number: int, stream: AsyncGenerator[T]) -> None:
        end = _End(None)
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(Numbered(number, item))
        except Exception as error:
            end = _End(error)
        await queue.put(Numbered(number, end))

    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(pump(number, stream), name="http-merge") for number, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            numbered = await queue.get()
            if not isinstance(numbered.item, _End):
                yield Numbered(numbered.stream, numbered.item)
                continue
            if numbered.item.error is not None:
                raise numbered.item.error
            num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
