"""The agent around a NIXL that fails on demand: what it says of reads whose end nobody can bring about or saw."""

import ctypes
from typing import Any

import numpy as np
import pytest

from engine.transfer import nixl_agent
from engine.transfer.checksum import checksum
from engine.transfer.landing import Landing
from engine.transfer.nixl_agent import NixlAgent, Region
from engine.transfer.nixl_read import NixlReceiver
from engine.transfer.plane import Plane, PlaneUnavailable, RemoteBlock, block_address, block_view
from engine.transfer.pool_server import PoolServer
from tests.engine.transfer.pool import Pool


class nixlRemoteDisconnectError(Exception):
    pass


class nixlBackendError(Exception):
    pass


class Handle:
    def __init__(self, targets: Any, sources: Any) -> None:
        self.targets, self.sources = targets, sources

    def release(self) -> None: ...


class FakeNixl:
    """Copies within this process. `state` is what a transfer says of itself; an exception is raised."""

    def __init__(self) -> None:
        self.state: str | Exception = "DONE"
        self.refusal: Exception | None = None
        self.state_when_posted = "PROC"
        self.num_posted = self.num_polled = 0
        self.num_registrations_left = 100

    def register_memory(self, regions: Any, kind: str) -> Any:
        self.num_registrations_left -= 1
        if self.num_registrations_left < 0:
            raise nixlBackendError("cannot lock memory")
        return regions

    def deregister_memory(self, registered: Any) -> None: ...

    def get_partial_agent_metadata(self, *_: Any) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> str:
        return "peer"

    def remove_remote_agent(self, name: str) -> None: ...

    def get_xfer_descs(self, table: Any, kind: str) -> Any:
        return table.tolist()

    def initialize_xfer(self, kind: str, targets: Any, sources: Any, name: str) -> Handle:
        return Handle(targets, sources)

    def transfer(self, handle: Handle) -> str:
        self.num_posted += 1
        if self.refusal is not None:
            raise self.refusal
        for (target, size, _), (source, _, _) in zip(handle.targets, handle.sources, strict=True):
            ctypes.memmove(target, source, size)
        return self.state_when_posted

    def check_xfer_state(self, handle: Handle) -> str:
        self.num_polled += 1
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    nixl = FakeNixl()
    monkeypatch.setattr(nixl_agent, "make_agent", lambda name: nixl)
    return nixl


@pytest.fixture
def words() -> np.ndarray:
    return np.arange(8, dtype=np.uint64)


def read(agent: NixlAgent, words: np.ndarray, landing: Landing) -> None:
    """From the first half to the second."""
    here, there = Region(words.ctypes.data, 32), Region(words.ctypes.data + 32, 32)
    agent.read(agent.connect(b"m"), [there], [here], landing, seconds=30)


@pytest.mark.parametrize("where", ["posting", "polling"])
def test_a_read_that_failed_for_an_unknown_reason_is_not_over_before_the_agent_closes(nixl, words, where):
    """Some of its descriptors may have been posted."""
    agent, landing = NixlAgent("a"), Landing()
    error = nixlBackendError("something")
    nixl.refusal, nixl.state = (error, error) if where == "posting" else (None, error)
    with pytest.raises(PlaneUnavailable, match="failed: something"):
        read(agent, words, landing)
    assert not landing.is_over
    assert agent.num_pending == 1
    with pytest.raises(PlaneUnavailable, match="broke"):
        agent.connect(b"m")
    agent.close()
    assert landing.is_over
    assert agent.num_pending == 0


def test_a_read_that_was_over_when_it_was_posted_is_not_asked_about(nixl, words):
    """As where the host's memory is copied by whoever posts."""
    agent, landing = NixlAgent("a"), Landing()
    nixl.state_when_posted, nixl.state = "DONE", nixlBackendError("its handle is released")
    read(agent, words, landing)
    assert words[4:].tolist() == [0, 1, 2, 3]
    assert (nixl.num_polled, agent.num_pending, landing.is_over) == (0, 0, True)
    agent.close()


@pytest.mark.parametrize("where", ["posting", "polling"])
def test_a_read_of_a_dead_connection_is_over(nixl, words, where):
    agent, landing = NixlAgent("a"), Landing()
    error = nixlRemoteDisconnectError("gone")
    nixl.refusal, nixl.state = (error, error) if where == "posting" else (None, error)
    with pytest.raises(PlaneUnavailable, match="failed: gone"):
        read(agent, words, landing)
    assert landing.is_over
    assert agent.num_pending == 0
    agent.close()


def test_what_is_not_known_is_known_once_the_connection_is_dead(nixl, words):
    agent, landing = NixlAgent("a"), Landing()
    nixl.state = nixlBackendError("something")
    with pytest.raises(PlaneUnavailable):
        read(agent, words, landing)
    assert not landing.is_over
    nixl.state = nixlRemoteDisconnectError("gone")
    assert landing.is_over
    agent.close()


def test_a_peer_that_took_too_long_is_not_read_again_over_this_connection(nixl, words):
    """Others wait in turn behind that read: each would wait as long."""
    agent, landing = NixlAgent("a"), Landing()
    remote, nixl.state = agent.connect(b"m"), "PROC"
    here = [Region(words.ctypes.data, 32)]
    with pytest.raises(PlaneUnavailable, match=r"took longer than 0\.01 s"):
        agent.read(remote, here, here, landing, seconds=0.01)
    nixl.num_posted = 0
    with pytest.raises(PlaneUnavailable, match="broke"):
        agent.read(remote, here, here, Landing(), seconds=30)
    assert nixl.num_posted == 0
    agent.close()


def test_words_that_nobody_wants_are_not_waited_for_and_their_row_comes_back(nixl, words):
    agent, stop = NixlAgent("a"), Landing()
    remote, source = agent.connect(b"m"), [Region(words.ctypes.data, 64)]
    poll = nixl.check_xfer_state

    def stop_then_poll(handle):
        stop.stop()
        return poll(handle)

    nixl.state, nixl.check_xfer_state = "PROC", stop_then_poll
    with pytest.raises(PlaneUnavailable, match="was stopped"):
        agent.read_words(remote, source, seconds=600, stop=stop)
    assert stop.is_over, "only the words are to be waited for, and they are the agent's"
    assert (agent.num_pending, agent.num_free_rows) == (1, 31)
    with pytest.raises(PlaneUnavailable, match="was stopped"):
        agent.read_words(remote, source, stop=stop)
    assert nixl.num_posted == 1, "what is stopped is not posted"
    nixl.state = "DONE"
    assert agent.read_words(remote, source).tolist() == words.tolist()
    assert agent.num_free_rows == 32
    agent.close()


@pytest.mark.parametrize("swept_by", ["connect", "disconnect"])
def test_after_a_break_a_new_connection_is_possible(nixl, words, swept_by):
    """A read that was left behind has ended, and nobody has looked."""
    agent = NixlAgent("a")
    remote = agent.connect(b"m")
    nixl.state = "PROC"
    with pytest.raises(PlaneUnavailable):
        agent.read_words(remote, [Region(words.ctypes.data, 64)], seconds=0.0)
    assert remote.is_broken
    if swept_by == "connect":
        agent.disconnect(remote)
        nixl.state = nixlRemoteDisconnectError("gone")
    else:
        nixl.state = nixlRemoteDisconnectError("gone")
        agent.disconnect(remote)
        assert agent.num_pending == 0
    again = agent.connect(b"m")
    assert again is not remote
    assert not again.is_broken
    agent.close()


def test_a_stopped_read_does_not_go_on_to_its_generations(nixl):
    pool, target = Pool(4, 64, seed=1), Pool(4, 64)
    server, agent, landing = PoolServer(pool, NixlAgent("sender")), NixlAgent("receiver"), Landing()
    receiver = NixlReceiver(server.info, 64, agent)
    blocks = [RemoteBlock(1, int(pool.generations[1]), checksum(block_view(pool, 1)))]
    receiver.read(blocks, [block_address(target, 2)], landing)
    assert np.array_equal(target.buffer[2], pool.buffer[1])
    post = nixl.transfer

    def stop_then_post(handle):
        landing.stop()
        post(handle)

    nixl.transfer, nixl.num_posted = stop_then_post, 0
    with pytest.raises(PlaneUnavailable, match="was stopped"):
        receiver.read(blocks, [block_address(target, 3)], landing)
    assert nixl.num_posted == 1
    receiver.close()
    agent.close()
    pool.close()
    target.close()


async def test_a_pool_that_cannot_be_registered_leaves_the_worker_without_an_agent(nixl, caplog):
    pool, agent = Pool(4, 64), NixlAgent("a")
    nixl.num_registrations_left = 0
    server = PoolServer(pool, agent)
    assert server.agent is None
    assert Plane.NIXL not in server.planes
    assert server.info.nixl_metadata == b""
    assert "NIXL does not register" in caplog.text
    assert "cannot lock memory" in caplog.text
    with pytest.raises(PlaneUnavailable, match="closed"):
        agent.connect(b"m")
    await server.close()
    pool.close()
