"""Copies beside the steps: streams that wait for the step before them, and let nobody but their caller wait.

    device thread    step's kernels ─► mark ─► next step's kernels ─► mark ─► …          (the compute stream)
    another thread                       └──► copy ─► the thread goes on                 (a copy stream)

A block that a step has written, or one that a step still reads and that was given to somebody else since, was in that
step before it was marked; so a copy that waits for the last mark comes after both.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class CopyStreams(Protocol):
    """`num_streams` streams of one device, for as many threads at a time."""

    def mark(self) -> None:
        """On the device thread, after a step's kernels were launched. Waits for the step before that one.

        Else the steps of a long prompt, which draw nothing, would all be queued, with every copy and request behind.
        """
        ...

    def run(self, number: int, launch: Callable[[], None]) -> None:
        """Launches copies on stream `number` behind the last mark, and returns when they have ended."""
        ...


class CudaStreams:
    """On a GPU."""

    def __init__(self, device: torch.device, num_streams: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(num_streams)]  # type: ignore[no-untyped-call]
        self._last = self._record()  # the pool is being filled with zeros

    def mark(self) -> None:
        before, self._last = self._last, self._record()
        before.synchronize()

    def run(self, number: int, launch: Callable[[], None]) -> None:
        stream = self._streams[number]
        done = _event()
        with torch.cuda.stream(stream):
            stream.wait_event(self._last)
            launch()
            done.record(stream)
        done.synchronize()

    def _record(self) -> torch.cuda.Event:
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event


def _event() -> torch.cuda.Event:
    """Blocking: the thread that waits for it sleeps meanwhile, it doesn't spin."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class HostStreams:
    """On tensors of the host, in Triton's interpreter: what was launched has ended."""

    def mark(self) -> None:
        """Nothing is under way."""

    def run(self, number: int, launch: Callable[[], None]) -> None:
        launch()


def open_streams(device: torch.device, num_streams: int) -> CopyStreams:
    return HostStreams() if device.type == "cpu" else CudaStreams(device, num_streams)
