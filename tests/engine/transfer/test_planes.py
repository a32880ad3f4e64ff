"""Every plane that reads the sender's pool copies the right bytes, notices wrong ones, and leaves nothing behind."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.transfer.checksum import checksum
from engine.transfer.negotiate import common_planes, open_receiver, wanted_planes
from engine.transfer.plane import (
    BlockReceiver,
    CorruptBlock,
    Plane,
    PlaneUnavailable,
    RemoteBlock,
    StaleBlock,
    block_address,
    block_view,
)
from engine.transfer.pool_server import PoolServer
from engine.transfer.tcp_server import TcpServer
from engine.transfer.tcp_wire import TcpSettings
from tests.engine.transfer.pool import Pool

NUM_BLOCKS, BLOCK_BYTES = 12, 1000
SHM = [Plane.SHM_VM, Plane.SHM_MAP, Plane.SHM_RING]
PLANES = [*SHM, Plane.TCP]


async def in_thread(function, *arguments):
    """asyncio.to_thread without a thread that outlives the test."""
    with ThreadPoolExecutor(1) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)


@pytest.fixture
def pools() -> Iterator[tuple[Pool, Pool]]:
    gc.collect()  # what earlier tests left for the collector
    num_fds = len(os.listdir("/proc/self/fd"))
    source = Pool(NUM_BLOCKS, BLOCK_BYTES, memfd=True, seed=1)
    target = Pool(NUM_BLOCKS, BLOCK_BYTES, seed=2)
    yield source, target
    source.close()
    target.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_fds


@asynccontextmanager
async def connected(pool: Pool, plane: Plane) -> AsyncIterator[tuple[PoolServer, BlockReceiver]]:
    server = PoolServer(pool, tcp=TcpServer(pool, TcpSettings()))
    server.start()
    receiver = await in_thread(open_receiver, [plane], server.info, BLOCK_BYTES)
    assert receiver is not None
    assert receiver.plane is plane
    try:
        yield server, receiver
    finally:
        receiver.close()
        await server.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("pool-server")]


async def describe(server: PoolServer, plane: Plane, block_id: int) -> RemoteBlock:
    digest = checksum(block_view(server.pool, block_id))
    if plane is Plane.SHM_RING:
        lease = server.open_ring_lease()
        slot, generation = lease.put(server.pool.buffer[block_id])
        return RemoteBlock(slot, generation, digest)
    return RemoteBlock(block_id, int(server.pool.generations[block_id]), digest)


@pytest.mark.parametrize("plane", PLANES)
async def test_copies_the_blocks(pools, plane):
    source, target = pools
    async with connected(source, plane) as (server, receiver):
        blocks = [await describe(server, plane, block_id) for block_id in (7, 0, 11)]
        await in_thread(receiver.read, blocks, [block_address(target, i) for i in (3, 4, 9)])
        assert (target.buffer[[3, 4, 9]] == source.buffer[[7, 0, 11]]).all()


@pytest.mark.parametrize("plane", PLANES)
async def test_corruption_and_reuse_are_noticed(pools, plane):
    source, target = pools
    async with connected(source, plane) as (server, receiver):
        good = await describe(server, plane, 5)
        address = block_address(target, 0)
        with pytest.raises(CorruptBlock):
            await in_thread(receiver.read, [RemoteBlock(good.slot, good.generation, good.checksum ^ 1)], [address])
        with pytest.raises(StaleBlock):
            await in_thread(receiver.read, [RemoteBlock(good.slot, good.generation + 1, good.checksum)], [address])
        await in_thread(receiver.read, [good], [address])


@pytest.mark.parametrize("plane", PLANES)
async def test_a_slot_outside_the_pool_is_not_read(pools, plane):
    """Beyond it lies other memory of the sender, whose generation and checksum a liar could name."""
    source, target = pools
    async with connected(source, plane) as (server, receiver):
        good = await describe(server, plane, 5)
        num_slots = server._ring.num_slots if plane is Plane.SHM_RING else NUM_BLOCKS
        for slot in (num_slots, 1 << 31, -1):
            with pytest.raises(PlaneUnavailable, match=f"slot {slot} is not one of the {num_slots}"):
                await in_thread(receiver.read, [good, RemoteBlock(slot, 1, 0)], [block_address(target, 0)] * 2)


async def test_a_mapping_smaller_than_the_pool_is_refused(pools):
    source, _ = pools
    server = PoolServer(source)
    server.start()
    larger = replace(server.info, pool_bytes=server.info.pool_bytes + 1)
    with pytest.raises(PlaneUnavailable, match="bytes to map of a pool of"):
        await in_thread(open_receiver, [Plane.SHM_MAP], larger, BLOCK_BYTES)
    await server.close()


async def test_a_block_reallocated_during_the_copy_is_stale(pools):
    source, target = pools
    async with connected(source, Plane.SHM_VM) as (server, receiver):
        block = await describe(server, Plane.SHM_VM, 5)
        copy = receiver._copy

        def copy_then_reallocate(*arguments):
            copy(*arguments)
            source.generations[5] += 1

        receiver._copy = copy_then_reallocate
        with pytest.raises(StaleBlock):
            await in_thread(receiver.read, [block], [block_address(target, 0)])


async def test_ring_slots_come_back_by_ack_and_by_close(pools):
    source, target = pools
    async with connected(source, Plane.SHM_RING) as (server, receiver):
        lease = server.open_ring_lease()
        ring = server._ring
        assert ring is not None
        for round_number in range(3):
            taken = [lease.put(source.buffer[i % NUM_BLOCKS]) for i in range(ring.num_slots)]
            waiting = asyncio.create_task(lease.wait_for_slot())
            await asyncio.sleep(0.01)
            assert not waiting.done(), "no slot is free"
            blocks = [
                RemoteBlock(slot, generation, checksum(block_view(source, i % NUM_BLOCKS)))
                for i, (slot, generation) in enumerate(taken)
            ]
            await in_thread(receiver.read, blocks[:1], [block_address(target, 1)])
            await asyncio.wait_for(waiting, 5)
            slot, generation = lease.put(source.buffer[2])
            assert slot == taken[0][0]
            assert generation > taken[0][1]
            lease.close()
            assert ring.num_free == ring.num_slots, round_number
        with pytest.raises(StaleBlock):
            await in_thread(receiver.read, blocks[1:2], [block_address(target, 1)])


async def test_wrong_process_is_noticed(pools):
    source, _ = pools
    server = PoolServer(source)
    server.start()
    other = PoolServer(source)
    other.start()
    info = server.info
    fake = type(info)(
        **{name: getattr(info, name) for name in info.__slots__}
        | {"token": b"x" * 16, "socket_name": other.info.socket_name}
    )
    for plane in SHM:
        with pytest.raises(PlaneUnavailable):
            await in_thread(open_receiver, [plane], fake, BLOCK_BYTES)
    assert await in_thread(open_receiver, [*SHM, Plane.GRPC], fake, BLOCK_BYTES) is None
    await server.close()
    await other.close()


async def test_private_pool_cannot_be_mapped():
    pool = Pool(2, 64)
    server = PoolServer(pool)
    server.start()
    assert Plane.SHM_MAP not in server.planes
    with pytest.raises(PlaneUnavailable, match="nothing to map"):
        await in_thread(open_receiver, [Plane.SHM_MAP], server.info, 64)
    await server.close()
    pool.close()


def test_common_planes():
    everything = wanted_planes("auto")
    sender = (Plane.SHM_VM, Plane.SHM_RING, Plane.TCP, Plane.GRPC)
    assert common_planes(everything, sender, same_host=True, allowed=everything) == sender
    assert common_planes(everything, sender, same_host=False, allowed=everything) == (Plane.TCP, Plane.GRPC)
    older = (Plane.SHM_VM, Plane.GRPC)
    assert common_planes(wanted_planes("tcp"), older, same_host=True, allowed=everything) == (Plane.GRPC,)
    assert common_planes(wanted_planes("shm"), sender, same_host=False, allowed=everything) == ()
    assert common_planes(everything, sender, same_host=True, allowed=wanted_planes("grpc")) == (Plane.GRPC,)
