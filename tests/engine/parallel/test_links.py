"""Rank 0's links to ranks that say, or fail to say, what the test wants: no process is started here."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import build
from engine.errors import EngineDied, ModelError
from engine.parallel import named_socket, rank, ranks
from engine.parallel.connection import limit_sending
from engine.parallel.launch import Arrival, ChildProcesses
from engine.parallel.machines import Machines
from engine.parallel.messages import Failed, Join, Load, Loaded, receive, send
from engine.parallel.model import ParallelModel
from engine.parallel.named_socket import RankListener, connect_rank
from engine.parallel.ranks import Ranks
from engine.parallel.shard import Shard
from kernels.paged import PagedBatch
from pagewire.config import engine_options

DIGEST = bytes(range(32))
MESSAGE = "x" * 1_000_000  # more than a socket buffers


class Scripted:
    """A launcher whose ranks are the test's other ends of socket pairs, `peers`."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.peers: list[Connection[Any, Any]] = []
        self.killed = threading.Event()
        self.closed = False
        self._arrivals: list[Arrival] = []

    def machine(self, rank: int) -> str:
        return ""

    def start(self, rank: int) -> "Scripted":
        own, other = socket.socketpair()
        self.peers.append(Connection(other.detach()))
        self._arrivals.append(Arrival(rank, 4710 + rank, own))
        return self

    def accept(self, timeout: float) -> Arrival | None:
        return self._arrivals.pop(0) if self._arrivals else None

    def how_it_ended(self, timeout: float) -> str | None:
        deadline = time.monotonic() + timeout
        while not (over := any(peer.closed for peer in self.peers)) and time.monotonic() < deadline:
            time.sleep(0.005)  # a peer's end is heard before it says of itself that it is closed
        return "exit code 1" if over else None

    def kill(self) -> None:
        self.killed.set()
        for peer in self.peers:
            peer.close()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def launcher() -> Scripted:
    return Scripted()


@pytest.fixture
def others(launcher: Scripted, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(ranks, "_END_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "STEP_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "LOAD_SECONDS", 5.0)
    options = engine_options(model=str(tiny_model("llama")), tensor_parallel_size=2)
    each = Ranks(options, launcher)
    yield each
    each.close()
    assert launcher.closed


def loaded(launcher: Scripted, digest: bytes = DIGEST) -> None:
    for peer in launcher.peers:
        assert isinstance(receive(peer), Load)
        send(peer, Loaded(digest, "float32/native/avx2/tp2", 1 << 30))


def join(others: Ranks) -> None:
    """As far as the ranks can come: they meet nobody."""
    for number, connection in others._connections.items():
        others._invite(number, connection, MESSAGE, [0])  # type: ignore[arg-type]


def test_a_rank_that_does_not_load_in_time_is_named(
    others: Ranks, launcher: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LOAD_SECONDS", 0.1)
    with pytest.raises(EngineDied, match=r"ranks \[1\] have not loaded their parts 0.1 s after rank 0"):
        others.wait_loaded(DIGEST)


def test_a_rank_with_other_weights_is_refused_by_name(others: Ranks, launcher: Scripted) -> None:
    loaded(launcher, bytes(32))
    with pytest.raises(ModelError, match=r"rank 1 has read other weights \(SHA-256 0000.*than rank 0 \(0001020304"):
        others.wait_loaded(DIGEST)


def test_the_pool_is_sized_when_all_have_loaded(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it would count the memory that the others' weights are about to take."""

    class Waited(Exception):
        pass

    def wait_loaded(digest: bytes) -> None:
        raise Waited

    monkeypatch.setattr(build, "available_memory", lambda: pytest.fail("others still load"))
    options = engine_options(model=str(tiny_model("llama")), dtype="float32", tensor_parallel_size=2, cpu_threads=2)
    ranks: Any = SimpleNamespace(wait_loaded=wait_loaded, machines=Machines({1: ""}))
    with pytest.raises(Waited):
        build._build_parts(options, None, ranks, ExitStack())


@pytest.mark.parametrize("words", ["a dead device", ""])
def test_a_rank_that_dies_after_loading_is_named_with_its_reason(others: Ranks, launcher: Scripted, words: str) -> None:
    loaded(launcher)
    others.wait_loaded(DIGEST)
    if words:
        send(launcher.peers[0], Failed(words, is_expected=False))
    launcher.peers[0].close()
    expected = f"rank 1 has failed: {words}" if words else r"rank 1 \(process 4711\) has died: exit code 1"
    with pytest.raises(EngineDied, match=expected):
        join(others)


def test_a_rank_that_reads_nothing_is_given_up(others: Ranks, launcher: Scripted) -> None:
    loaded(launcher)
    others.wait_loaded(DIGEST)
    with pytest.raises(EngineDied, match=r"TimeoutError: rank 1 has read nothing for 0.2 s"):
        others.tell(MESSAGE)


def test_a_rank_that_reads_nothing_holds_up_no_stop(
    others: Ranks, launcher: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill` ends the step that waits for it, long before its time is up."""
    monkeypatch.setattr(ranks, "STEP_SECONDS", 60.0)
    loaded(launcher)
    others.wait_loaded(DIGEST)
    limit_sending(others._connections[1], 60.0)
    found: list[BaseException] = []

    def step() -> None:
        try:
            others.tell(MESSAGE)
        except EngineDied as error:
            found.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    others.kill()
    thread.join(10.0)
    assert len(found) == 1


def test_a_death_before_anybody_asks_is_told_at_once(others: Ranks, launcher: Scripted) -> None:
    loaded(launcher)
    others.wait_loaded(DIGEST)
    launcher.peers[0].close()
    others._watch()
    told: list[BaseException] = []
    others.on_death = told.append
    assert [str(error) for error in told] == ["rank 1 (process 4711) has died: exit code 1"]


@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_a_rank_that_dies_before_it_meets_the_others_ends_the_meeting(
    others: Ranks, launcher: Scripted, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """In shared memory, where there is the extension for it, and over gloo, which would wait for it for minutes."""
    invited, over = threading.Event(), threading.Event()

    def meet(*arguments: object) -> None:
        over.wait(60.0)

    monkeypatch.setattr("engine.parallel.process_ranks.ProcessRanks", meet)
    others._backend = backend
    loaded(launcher)
    others.wait_loaded(DIGEST)

    def die() -> None:
        (peer,) = launcher.peers
        assert isinstance(receive(peer), Join)
        invited.set()
        peer.close()

    thread = threading.Thread(target=die)
    thread.start()
    memory = SimpleNamespace(fd=os.memfd_create("pool"), num_blocks=1, layout=None, groups=None)
    with pytest.raises(EngineDied, match=r"rank 1 \(process 4711\) has died: exit code 1"):
        others._meet(memory)  # type: ignore[arg-type]
    assert invited.is_set()
    over.set()
    thread.join()
    os.close(memory.fd)


def test_closing_goes_on_to_the_end(others: Ranks, launcher: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the ranks load, and although one can't be killed."""

    def kill() -> None:
        Scripted.kill(launcher)
        raise OSError("no such process")

    monkeypatch.setattr(launcher, "kill", kill)
    with pytest.raises(OSError, match="no such process"):
        others.close()
    assert launcher.closed
    assert not others._connections
    assert not any(thread.is_alive() for thread in others._threads)


def test_a_rank_that_arrives_while_the_ranks_are_closed_is_let_go(
    launcher: Scripted, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, closing = threading.Event(), threading.Event()
    accept = launcher.accept

    def late(timeout: float) -> Arrival | None:
        asked.set()
        closing.wait(5.0)
        return accept(timeout)

    monkeypatch.setattr(launcher, "accept", late)
    others = Ranks(engine_options(model=str(tiny_model("llama")), tensor_parallel_size=2), launcher)
    assert asked.wait(5.0)
    monkeypatch.setattr(launcher, "kill", closing.set)
    (peer,) = launcher.peers
    others.close()
    with pytest.raises((EOFError, OSError)):
        receive(peer)
    peer.close()


def test_what_a_rank_can_not_read_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exited(BaseException):
        pass

    def exit_(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", exit_)
    own, other = (Connection(each.detach()) for each in socket.socketpair())
    with own, other:
        own.send_bytes(b"no pickle")
        with pytest.raises(Exited, match="1"):
            rank._read(other, queue.SimpleQueue())
        failed = receive(own)
    assert isinstance(failed, Failed)
    assert "UnpicklingError" in failed.reason


@pytest.fixture
def listener() -> Iterator[RankListener]:
    each = RankListener()
    yield each
    each.close()


def test_a_stranger_holds_nobody_up(listener: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one that says it too slowly, one that has another token."""
    monkeypatch.setattr(named_socket, "HELLO_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as slow:
        for stranger in (silent, slow):
            stranger.connect("\0" + listener.address)
        slow.send(b"x")
        wrong = connect_rank(listener.address, bytes(32), 1)
        right = connect_rank(listener.address, listener.token, 3)
        started_at = time.monotonic()
        assert [listener.accept(5.0) for _ in range(3)] == [None] * 3
        arrival = listener.accept(5.0)
        assert time.monotonic() - started_at < 5.0
        wrong.close()
    assert arrival is not None
    assert (arrival.rank, arrival.pid) == (3, os.getpid())
    with right, arrival.connection as own:
        right.sendall(b"hello")
        assert own.recv(5) == b"hello"
    assert listener.accept(0.01) is None


def test_another_users_process_is_not_heard_on_either_side(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_rank(listener.address, listener.token, 1):
        monkeypatch.setattr(os, "getuid", lambda: 1 << 20)
        assert listener.accept(5.0) is None
        with pytest.raises(PermissionError, match=r"rank 0 is user 1048576, but user \d+ listens"):
            connect_rank(listener.address, listener.token, 1)


def test_children_inherit_a_socket_that_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def popen(command: list[str], **options: Any) -> SimpleNamespace:
        started.append(options)
        return SimpleNamespace(pid=4711)

    monkeypatch.setattr("subprocess.Popen", popen)
    launcher = ChildProcesses()
    launcher.start(1)
    arrival = launcher.accept(0.0)
    assert arrival is not None
    with arrival.connection as connection:
        assert (arrival.rank, arrival.pid) == (1, 4711)
        assert connection.getsockname() == connection.getpeername() == ""
    assert started[0]["env"][rank.INHERITED] == f"{started[0]['pass_fds'][0]}:1"
    launcher.close()


def test_a_step_that_can_not_be_told_is_the_last_one() -> None:
    """The next one would be told as a change of tables that the ranks have never got."""

    class Others:
        def tell(self, message: object) -> None:
            raise MemoryError

        def lost(self, error: Exception) -> EngineDied:
            return EngineDied(repr(error))

    own: Any = SimpleNamespace(config=SimpleNamespace(shard=Shard(0, 2, 2, 8, 300)))
    nothing: Any = None
    others: Any = Others()
    model = ParallelModel(own, nothing, 300, nothing, others)
    token = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(EngineDied, match="MemoryError"):
        model.forward(token, token, PagedBatch.build([1], [1], [[0]], 16), nothing)
