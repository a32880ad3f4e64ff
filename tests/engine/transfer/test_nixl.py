"""Plane NIXL between two agents of one process: right bytes, wrong ones noticed, nothing left behind."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from engine.transfer.checksum import checksum
from engine.transfer.landing import Landing
from engine.transfer.negotiate import Means, common_planes, open_receiver, start_agent, wanted_planes
from engine.transfer.nixl_agent import NixlAgent, Region
from engine.transfer.nixl_load import is_installed
from engine.transfer.nixl_read import NixlReceiver
from engine.transfer.plane import (
    CorruptBlock,
    Plane,
    PlaneUnavailable,
    RemoteBlock,
    StaleBlock,
    block_address,
    block_view,
)
from engine.transfer.pool_server import PoolServer
from tests.engine.transfer.pool import Pool

needs_nixl = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed (extra pagewire[nixl])")
NUM_BLOCKS, BLOCK_BYTES = 700, 1000


class Pair:
    """A sender and a receiver with an agent each."""

    def __init__(self) -> None:
        self.source, self.target = Pool(NUM_BLOCKS, BLOCK_BYTES, seed=1), Pool(NUM_BLOCKS, BLOCK_BYTES, seed=2)
        self.sender, self.agent = PoolServer(self.source, NixlAgent("sender")), NixlAgent("receiver")
        self.agent.share([Region(self.target.address, self.target.buffer.nbytes)])

    def open(self) -> NixlReceiver:
        receiver = open_receiver([Plane.NIXL], self.sender.info, BLOCK_BYTES, Means(self.agent))
        assert isinstance(receiver, NixlReceiver)
        return receiver

    def block(self, block_id: int) -> RemoteBlock:
        view = block_view(self.source, block_id)
        return RemoteBlock(block_id, int(self.source.generations[block_id]), checksum(view))

    def addresses(self, *block_ids: int) -> list[int]:
        return [block_address(self.target, block_id) for block_id in block_ids]


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    num_threads = len(os.listdir("/proc/self/task"))
    both = Pair()
    yield both
    assert both.agent.num_pending == 0
    assert both.agent.num_remotes == 0
    assert both.agent.num_free_rows == 32
    both.agent.close()
    both.agent.close()
    await both.sender.close()
    both.source.close()
    both.target.close()
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) > num_threads:  # UCX's threads are gone, too
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@needs_nixl
async def test_copies_the_blocks_near_and_far():
    async with pair() as both:
        receiver = both.open()
        for ids, into in (((7, 0, 11), (3, 4, 9)), ((5, 6, 7, 690), (20, 21, 22, 23)), (range(100, 250), range(150))):
            receiver.read([both.block(i) for i in ids], both.addresses(*into))
            assert np.array_equal(both.target.buffer[list(into)], both.source.buffer[list(ids)])
        untouched = Pool(NUM_BLOCKS, BLOCK_BYTES, seed=2)
        assert np.array_equal(both.target.buffer[150:], untouched.buffer[150:])
        untouched.close()
        receiver.close()
        receiver.close()


@needs_nixl
async def test_corruption_reuse_and_slots_outside_the_pool_are_noticed(monkeypatch):
    async with pair() as both:
        receiver = both.open()
        good, here = both.block(5), both.addresses(0)
        with pytest.raises(CorruptBlock):
            receiver.read([RemoteBlock(5, good.generation, good.checksum ^ 1)], here)
        with pytest.raises(StaleBlock):
            receiver.read([RemoteBlock(5, good.generation + 1, good.checksum)], here)
        for slot in (NUM_BLOCKS, 1 << 31, -1):
            with pytest.raises(PlaneUnavailable, match=f"slot {slot} is not one of the {NUM_BLOCKS}"):
                receiver.read([good, RemoteBlock(slot, 1, 0)], here * 2)
        copy = receiver._copy

        def copy_after_the_lease(*arguments):
            """The lease has ended and the block was handed out anew, with the very same bytes."""
            copy(*arguments)
            both.source.generations[5] += 1

        monkeypatch.setattr(receiver, "_copy", copy_after_the_lease)
        with pytest.raises(StaleBlock):
            receiver.read([good], here)
        receiver.close()


@needs_nixl
async def test_a_connection_is_shared_and_goes_with_its_last_user():
    async with pair() as both:
        first, second = both.open(), both.open()
        assert both.agent.num_remotes == 1
        first.close()
        second.read([both.block(1)], both.addresses(1))
        second.close()
        assert both.agent.num_remotes == 0
        again = both.open()
        again.read([both.block(2)], both.addresses(2))
        again.close()


@needs_nixl
async def test_memory_that_is_not_shared_cannot_be_read():
    async with pair() as both:
        receiver = both.open()
        secret = np.arange(8, dtype=np.uint64)
        with pytest.raises(PlaneUnavailable, match="cannot read"):
            both.agent.read_words(receiver._remote, [Region(secret.ctypes.data, 64)])
        receiver.close()


def read_for_ever(receiver, blocks, addresses):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        receiver.read(blocks, addresses)


@needs_nixl
async def test_a_closed_sender_is_noticed():
    async with pair() as both:
        receiver = both.open()
        blocks = [both.block(1)]
        await both.sender.close()
        with pytest.raises(PlaneUnavailable):
            read_for_ever(receiver, blocks, both.addresses(1))
        with pytest.raises(PlaneUnavailable, match="broke"):
            both.open()
        receiver.close()


@needs_nixl
async def test_bad_metadata_is_refused():
    async with pair() as both:
        for metadata in (b"", b"nonsense"):
            with pytest.raises(PlaneUnavailable):
                both.agent.connect(metadata)


def test_who_has_nixl_decides_the_plane():
    nixl, everything = wanted_planes("nixl"), wanted_planes("auto")
    assert nixl == (Plane.NIXL, Plane.TCP, Plane.GRPC)
    sender = (Plane.SHM_VM, Plane.NIXL, Plane.GRPC)
    for same_host in (True, False):
        assert common_planes(nixl, sender, same_host=same_host, allowed=nixl) == (Plane.NIXL, Plane.GRPC)
        assert common_planes(nixl, (Plane.SHM_VM, Plane.GRPC), same_host=same_host, allowed=everything) == (Plane.GRPC,)
    assert Plane.NIXL not in everything, "its ports are open to the network: it must be asked for"
    assert start_agent(everything, "nobody") is None


def test_a_worker_without_an_agent_takes_the_next_plane(caplog):
    pool = Pool(2, 64)
    info = PoolServer(pool).info
    with caplog.at_level("INFO", "engine.transfer.negotiate"):
        assert open_receiver([Plane.NIXL, Plane.GRPC], info, 64) is None
    assert "plane NIXL does not work" in caplog.text
    pool.close()


def test_a_landing_is_over_when_its_plane_says_so():
    landing, over = Landing(), [False]
    assert landing.is_over
    landing.leave(lambda: over[0])
    assert not landing.is_over
    over[0] = True
    assert landing.is_over
