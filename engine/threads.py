"""Work on threads that an event loop waits for whatever happens."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


async def run_to_the_end(
    threads: ThreadPoolExecutor, function: Callable[..., R], *arguments: Any, on_cancel: Callable[[], None] | None
) -> R:
    """Runs `function` on one of `threads` and does not return before it has ended, even when cancelled.

    `on_cancel` may ask it to end early.
    """
    running = asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()
        raise
