"""Plane NIXL between two processes over TCP, where a READ needs the sender: dead and frozen ones."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.transfer.checksum import checksum
from engine.transfer.landing import Landing
from engine.transfer.nixl_agent import NixlAgent, Region
from engine.transfer.nixl_load import is_installed
from engine.transfer.nixl_read import NixlReceiver
from engine.transfer.plane import PlaneUnavailable, RemoteBlock, SharedPoolInfo, block_address, block_view
from tests.engine.transfer.pool import Pool

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed (extra pagewire[nixl])")
NUM_BLOCKS, BLOCK_BYTES = 32, 1 << 20
SENDER = f"""
import asyncio, dataclasses, json, sys
from engine.transfer.nixl_agent import NixlAgent
from engine.transfer.pool_server import PoolServer
from tests.engine.transfer.pool import Pool

async def main():
    server = PoolServer(Pool({NUM_BLOCKS}, {BLOCK_BYTES}, seed=3), NixlAgent("sender"))
    info = dataclasses.asdict(server.info)
    del info["tcp_secret"]
    for name in ("token", "nixl_metadata"):
        info[name] = info[name].hex()
    print(json.dumps(info), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""

RECEIVER = f"""
import json, sys
from engine.transfer.nixl_agent import NixlAgent, Region
from engine.transfer.nixl_read import NixlReceiver
from engine.transfer.plane import RemoteBlock, SharedPoolInfo, block_address
from tests.engine.transfer.pool import Pool

said, digests = json.loads(sys.argv[1])
info = SharedPoolInfo(**said | {{name: bytes.fromhex(said[name]) for name in ("token", "nixl_metadata")}})
target, agent = Pool({NUM_BLOCKS}, {BLOCK_BYTES}), NixlAgent("mortal")
agent.share([Region(target.address, target.buffer.nbytes)])
receiver = NixlReceiver(info, {BLOCK_BYTES}, agent)
print("reading", flush=True)
while True:
    blocks = [RemoteBlock(i, i + 1, digest) for i, digest in enumerate(digests)]
    receiver.read(blocks, [block_address(target, i) for i in range({NUM_BLOCKS})])
"""


@dataclasses.dataclass
class Link:
    said: dict[str, Any]
    child: "subprocess.Popen[str]"
    agent: NixlAgent
    receiver: NixlReceiver
    target: Pool
    blocks: list[RemoteBlock]
    addresses: list[int]

    def read(self, landing: Landing | None = None) -> None:
        self.receiver.read(self.blocks, self.addresses, landing)

    def read_for_ever(self, landing: Landing) -> None:
        while True:
            self.read(landing)


@pytest.fixture
def link() -> Iterator[Link]:
    child = subprocess.Popen(
        [sys.executable, "-c", SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"UCX_TLS": "tcp"},
    )
    assert child.stdout is not None
    said = json.loads(child.stdout.readline())
    info = SharedPoolInfo(**said | {name: bytes.fromhex(said[name]) for name in ("token", "nixl_metadata")})
    source, target = Pool(NUM_BLOCKS, BLOCK_BYTES, seed=3), Pool(NUM_BLOCKS, BLOCK_BYTES, seed=4)
    agent = NixlAgent("receiver")
    agent.share([Region(target.address, target.buffer.nbytes)])
    blocks = [RemoteBlock(i, i + 1, checksum(block_view(source, i))) for i in range(NUM_BLOCKS)]
    addresses = [block_address(target, i) for i in range(NUM_BLOCKS)]
    link = Link(said, child, agent, NixlReceiver(info, BLOCK_BYTES, agent), target, blocks, addresses)
    link.read()
    assert np.array_equal(target.buffer, source.buffer)
    yield link
    link.receiver.close()
    until(lambda: agent.num_remotes == 0)
    assert agent.num_free_rows == 32
    agent.close()
    child.kill()
    child.communicate()
    source.close()
    target.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sender_killed_in_the_middle_is_noticed(link):
    threading.Timer(0.01, link.child.kill).start()
    landing = Landing()
    with pytest.raises(PlaneUnavailable):
        link.read_for_ever(landing)
    assert landing.is_over
    with pytest.raises(PlaneUnavailable, match="broke"):
        link.read()
    assert link.agent.num_pending == 0


def test_a_sender_outlives_readers_killed_in_the_middle(link):
    what = json.dumps([link.said, [block.checksum for block in link.blocks]])
    for delay in (0.02, 0.05):
        reader = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, what], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        time.sleep(delay)
        reader.kill()
        reader.communicate()
        link.read()
    assert link.child.poll() is None


def test_what_a_frozen_sender_owes_lands_when_it_wakes_and_not_later_than_we_know(link):
    link.child.send_signal(signal.SIGSTOP)
    link.target.buffer[:] = 0
    landing = Landing()
    threading.Timer(0.2, landing.stop).start()
    with pytest.raises(PlaneUnavailable, match="was stopped"):
        link.read(landing)
    assert not landing.is_over, "the blocks may not be given to anybody"
    assert link.agent.num_pending == 1
    link.child.send_signal(signal.SIGCONT)
    until(lambda: landing.is_over)
    assert link.target.buffer.any(), "it did land, after the read was given up"
    link.target.buffer[:] = 0
    time.sleep(0.3)
    assert not link.target.buffer.any(), "but not after it was said to be over"
    link.read()


def test_closing_with_a_read_pending_leaves_nothing(link):
    link.child.send_signal(signal.SIGSTOP)
    landing = Landing()
    landing.stop()
    with pytest.raises(PlaneUnavailable):
        link.read(landing)
    link.agent.close()
    assert landing.is_over
    link.target.buffer[:] = 0
    link.child.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert not link.target.buffer.any()
    assert link.agent.num_remotes == 0


def test_an_idle_agent_does_not_spin(link):
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.5, "NIXL's default keeps a core busy"
