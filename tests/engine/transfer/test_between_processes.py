"""Shared memory and TCP between two processes, and what a SIGKILL of the sender leaves: nothing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.transfer.checksum import checksum
from engine.transfer.negotiate import open_receiver
from engine.transfer.plane import (
    Plane,
    PlaneUnavailable,
    RemoteBlock,
    SharedPoolInfo,
    StaleBlock,
    block_address,
    block_view,
)
from tests.engine.transfer.pool import Pool

NUM_BLOCKS, BLOCK_BYTES = 6, 5000
SENDER = """
import asyncio, dataclasses, json, sys
from engine.transfer.pool_server import PoolServer
from engine.transfer.tcp_server import TcpServer
from engine.transfer.tcp_wire import TcpSettings
from tests.engine.transfer.pool import Pool

async def main():
    pool = Pool(6, 5000, memfd=True, seed=3)
    server = PoolServer(pool, tcp=TcpServer(pool, TcpSettings()))
    server.start()
    ring = server.open_ring_lease()
    slots = [ring.put(pool.buffer[block_id]) for block_id in range(2)]
    info = dataclasses.asdict(server.info)
    del info["nixl_metadata"]
    secrets = {name: info[name].hex() for name in ("token", "tcp_secret")}
    print(json.dumps(info | secrets | {"slots": slots}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


@pytest.fixture
def sender() -> Iterator[tuple[subprocess.Popen[str], SharedPoolInfo, list[tuple[int, int]]]]:
    child = subprocess.Popen(
        [sys.executable, "-c", SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert child.stdout is not None
    said = json.loads(child.stdout.readline())
    slots = [tuple(slot) for slot in said.pop("slots")]
    secrets = {name: bytes.fromhex(said[name]) for name in ("token", "tcp_secret")}
    yield child, SharedPoolInfo(**said | secrets), slots
    child.kill()
    child.communicate()


@pytest.mark.parametrize("plane", [Plane.SHM_VM, Plane.SHM_MAP, Plane.SHM_RING, Plane.TCP])
def test_another_process_reads_and_survives_a_kill(sender, plane):
    child, info, slots = sender
    source, target = Pool(NUM_BLOCKS, BLOCK_BYTES, seed=3), Pool(NUM_BLOCKS, BLOCK_BYTES, seed=4)
    assert info.pid == child.pid
    receiver = open_receiver([plane], info, BLOCK_BYTES)
    assert receiver is not None
    if plane is not Plane.SHM_RING:
        slots = [(block_id, int(source.generations[block_id])) for block_id in range(2)]
    blocks = [RemoteBlock(*slot, checksum(block_view(source, i))) for i, slot in enumerate(slots)]
    receiver.read(blocks, [block_address(target, i) for i in range(2)])
    assert np.array_equal(target.buffer[:2], source.buffer[:2])
    child.kill()
    child.wait()
    if plane is Plane.SHM_MAP:
        receiver.read(blocks, [block_address(target, i) for i in range(2)])  # the mapping outlives the process
    else:
        with pytest.raises((PlaneUnavailable, StaleBlock)):  # stale: the ring's slots were acknowledged before
            receiver.read(blocks, [block_address(target, i) for i in range(2)])
    receiver.close()
    with pytest.raises(PlaneUnavailable):
        open_receiver([plane], info, BLOCK_BYTES)
    source.close()
    target.close()
