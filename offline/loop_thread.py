"""An event loop on a thread of its own, for callers that are no coroutines: scripts, and notebooks with a loop."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

CANCEL_SECONDS = 10.0
"""For cancelled work to end before who has interrupted it goes on: a step may hang, e.g. of a rank that is frozen."""
T = TypeVar("T")


class LoopThread:
    """Starts at once; `run` until `close`. Any thread may call `run`, several at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewire-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` comes to. When the waiting is interrupted (Ctrl-C) the work is cancelled first, to its end.

        After CANCEL_SECONDS it ends without anybody waiting for it.
        """
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda done: _pass_on(done, outcome))

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before the loop was told
                work.close()
                outcome.set_exception(asyncio.CancelledError())

        try:
            self._loop.call_soon_threadsafe(start)
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self._loop.call_soon_threadsafe(cancel)
                wait([outcome], CANCEL_SECONDS)
            raise

    def close(self) -> None:
        """Ends what still runs, and the thread."""
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _pass_on(task: "asyncio.Task[T]", outcome: "Future[T]") -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
