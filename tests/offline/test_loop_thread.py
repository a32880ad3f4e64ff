"""Waiting for coroutines, and for their end when the waiting is interrupted."""

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable

import pytest

from offline import loop_thread
from offline.loop_thread import LoopThread


def test_ctrl_c_does_not_wait_for_ever_for_what_it_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a rank that is frozen ends after minutes."""
    monkeypatch.setattr(loop_thread, "CANCEL_SECONDS", 0.1)
    started, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    waited: list[bool] = []

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            waited.append(await asyncio.to_thread(goes_on.wait, 20))
            ended.set()

    def interrupt() -> None:
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = LoopThread()
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    goes_on.set()
    assert ended.wait(20)
    assert waited == [True], "it was waited for"
    thread.close()


@pytest.mark.parametrize("is_told", [True, False])
def test_ctrl_c_at_the_very_beginning_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch, *, is_told: bool) -> None:
    """It comes while the loop is being told of the work, when that has begun already, or before it is told."""
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    thread = LoopThread()
    tell = thread._loop.call_soon_threadsafe

    def interrupted(callback: Callable[[], None]) -> None:
        monkeypatch.undo()
        if is_told:
            tell(callback)
            assert started.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    coroutine = work()
    with pytest.raises(KeyboardInterrupt):
        thread.run(coroutine)
    assert ended.is_set() == started.is_set() == is_told
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    thread.close()
