"""Background tasks: run several side by side, and end them for sure."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks until they are done; what they raise is dropped. Being cancelled meanwhile changes nothing.

    Once is not enough: redis-py sends through asyncio.wait_for, and in Python 3.11 that loses a cancellation which
    meets its result; the task then lives on (tests/kvstore/test_publisher.py stops publishers at every moment).
    """
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=0.05)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that nobody is told "never retrieved"
    if cancelled is not None:
        raise cancelled


async def until_first_ends(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all side by side; when one ends, ends the others and raises what it raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(*tasks)


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; TimeoutError after `seconds`, to the point, even if `work` does not notice (see above).

    So `work` must come to an end by itself too.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise TimeoutError(f"not done in {seconds:g} s")
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, also if cancelled meanwhile (that is raised afterwards), as often as `end_tasks` does it:
    a connection that is closed half is never closed. So `work` must end by itself.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
