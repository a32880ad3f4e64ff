"""Waiting for coroutines, and for their end when the waiting is interrupted."""

import asyncio
import os
import signal
import threading

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
