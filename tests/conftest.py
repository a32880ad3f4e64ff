"""Fixtures for all tests: tiny models, and the promise that no test leaves anything behind."""

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton reads it when it is imported, which peft and others do by the way.
os.environ["TRITON_INTERPRET"] = "1"

from tests.chaos.zygote import Zygote
from tests.tiny_models import make_tiny_model

settings.register_profile("ci", max_examples=30, deadline=None)
SETTLE_SECONDS = 60.0  # gRPC gives up what does not connect after 20 s; only a test that fails waits for so long
GRPC_SECONDS = 5.0
TCP_ESTABLISHED, TCP_LISTEN = 1, 10  # of tcp_info.tcpi_state
TCP_STATES = {TCP_ESTABLISHED: "ESTABLISHED", TCP_LISTEN: "LISTEN"}
# Envoy, Intel's OpenMP, Ray and the semaphores of Python's multiprocessing. Ours is memfds, which have no names.
FOREIGN_SHARED_MEMORY = ("envoy_", "__KMP_", "plasma", "ray_", "sem.")
# Threads that libraries start once per process and keep.
LIBRARY_THREADS = (
    "_poll_wrapper",
    "pytest_timeout",
    "tqdm_monitor",
    "grpc",
    "ThreadPoolExecutor-grpc",
    "Thread-cygrpc",
    "Dummy-",  # a thread of gRPC's core that called into Python
)


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis tries fewer examples in CI than elsewhere. Ctrl-C works, also where a shell started us with `&`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr == "not nightly":
        settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file of a minute that begins last would end alone."""
    items.sort(key=lambda item: "transfer_svc/triton" not in item.path.as_posix())


def pytest_collection_finish() -> None:
    """Modules, classes and functions stay: the garbage collector need not look at them after every test."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Else libraries that count their objects at exit report every one of them as lost."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once per session and arguments) a tiny model: `tiny_model("llama", seed=1, num_hidden_layers=2)`."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = make_tiny_model(family, tmp_path_factory.mktemp(family), **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts processes of pagewire quickly."""
    zygote = Zygote()
    yield zygote
    zygote.close()


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not any(mark in thread.name for mark in LIBRARY_THREADS)
    }


def _descriptors(kind: str) -> Iterator[tuple[int, str]]:
    """This process's open files whose targets begin so."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{number}")).startswith(kind):
                yield int(number), target


def _sockets() -> set[str]:
    """This process's open network sockets; asyncio's own socket pairs are none.

    Each is asked itself: psutil reads the tables of the whole machine, 11 ms of CPU four times a test.
    """
    found = set()
    for number, _ in _descriptors("socket:"):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                continue
            state = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            if state in TCP_STATES:
                peer = copy.getpeername() if state == TCP_ESTABLISHED else ""
                found.add(f"fd {number}: {copy.getsockname()} {peer} {TCP_STATES[state]}")
    return found


def _memfds() -> set[str]:
    return {f"fd {number}: {target}" for number, target in _descriptors("/memfd:")}


def _descendants() -> set[int]:
    """From the kernel's own lists: psutil looks at every process of the machine, 4 ms of CPU twice a test."""
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for threads in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = {int(pid) for pid in threads.read_text().split()}
                waiting += children
                found |= children
    return found


def _children() -> set[int]:
    alive = set()
    for pid in _descendants():
        try:
            child = psutil.Process(pid)
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                alive.add(child.pid)
        except psutil.Error:
            continue
    return alive


def shared_memory() -> set[str]:
    """The machine's shared memory files, but those of other programs: other test processes run them at this time."""
    directory = Path("/dev/shm")
    found = directory.iterdir() if directory.is_dir() else ()
    return {path.name for path in found if not path.name.startswith(FOREIGN_SHARED_MEMORY)}


def _what_is_there() -> dict[str, set[Any]]:
    return {
        "threads": _threads(),
        "processes": _children(),
        "sockets": _sockets(),
        "memfds": _memfds(),
        "shared memory": shared_memory(),
    }


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves a thread, a child process, a socket or shared memory behind."""
    before = _what_is_there()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := {kind: found - before[kind] for kind, found in _what_is_there().items() if found - before[kind]}:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        gc.collect()  # what only a cycle of references holds; a fifth of a second, so not after every test
        time.sleep(0.05)


@pytest.fixture
def grpc_seconds(request: pytest.FixtureRequest) -> float:
    """How long an async test's loop goes on for connections that have not ended with the test."""
    return GRPC_SECONDS if pytest_asyncio.is_async_test(request.node) else 0.0


@pytest_asyncio.fixture(autouse=True)
async def no_task_is_left(nothing_is_left: None, grpc_seconds: float) -> AsyncIterator[None]:
    """Fails an async test that leaves a task behind. Ends before `nothing_is_left` looks, which stops the loop."""
    before, sockets = asyncio.all_tasks(), _sockets()
    yield
    started = time.monotonic()
    while True:
        left = {t for t in asyncio.all_tasks() if t not in before and t is not asyncio.current_task() and not t.done()}
        waited = time.monotonic() - started
        if left and waited > SETTLE_SECONDS:
            pytest.fail(f"tasks left behind: {[t.get_coro() for t in left]}")
        # The end of a cancelled grpc.aio call is handled by its own loop or never; until then its connection stands.
        if not left and (waited >= grpc_seconds or not _sockets() - sockets):
            return
        await asyncio.sleep(0.02)
