"""What CUDA would be told, in which order: torch's streams and events replaced by ones that only write it down."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.device_streams import CudaStreams


class FakeCuda:
    """`log` has (stream, what) in the order of the calls."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.current = "compute"
        self.num_events = self.num_streams = 0

    def Stream(self, device: torch.device) -> "FakeStream":
        self.num_streams += 1
        return FakeStream(self, f"copy {self.num_streams}")

    def Event(self, *, blocking: bool = False) -> "FakeEvent":
        self.num_events += 1
        return FakeEvent(self, f"event {self.num_events}", blocking)

    def current_stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, self.current)

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_event(self, event: "FakeEvent") -> None:
        self._cuda.log.append((self.name, f"wait for {event.name}"))


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str, blocking: bool) -> None:
        self._cuda, self.name, self._blocking = cuda, name, blocking

    def record(self, stream: FakeStream) -> None:
        self._cuda.log.append((stream.name, f"record {self.name}"))

    def synchronize(self) -> None:
        self._cuda.log.append(("thread", f"{'sleep' if self._blocking else 'spin'} until {self.name}"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_a_copy_waits_for_the_last_step_and_its_thread_for_the_copy(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda"), 2)
    streams.mark()
    streams.run(1, lambda: cuda.log.append((cuda.current, "launch")))
    assert cuda.log == [
        ("compute", "record event 1"),  # zeros of the pool
        ("compute", "record event 2"),
        ("thread", "sleep until event 1"),
        ("copy 2", "wait for event 2"),
        ("copy 2", "launch"),
        ("copy 2", "record event 3"),
        ("thread", "sleep until event 3"),
    ]


def test_the_device_thread_is_one_step_ahead(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda"), 1)
    streams.mark()
    cuda.log.clear()
    for _ in range(2):
        streams.mark()
    assert cuda.log == [
        ("compute", "record event 3"),
        ("thread", "sleep until event 2"),
        ("compute", "record event 4"),
        ("thread", "sleep until event 3"),
    ]
