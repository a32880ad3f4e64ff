"""The receiving process of `transfer.py`: every way in which it copies the sender's blocks into its pool."""

import asyncio
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.transfer_sender import CHANNEL_OPTIONS, describe, make_pool
from engine.memory import KvMemory
from engine.transfer.checksum import checksum_at
from engine.transfer.copies import copy_blocks
from engine.transfer.frames import BlockFrame
from engine.transfer.negotiate import Means, boot_id, open_receiver, start_agent
from engine.transfer.nixl_agent import NixlAgent
from engine.transfer.nixl_load import is_installed
from engine.transfer.plane import BlockReceiver, Plane, RemoteBlock, SharedPoolInfo, block_address
from engine.transfer.pool_server import PoolServer
from transfer_svc.client import PulledEnd, TransferClient
from transfer_svc.service import FRAME_BYTES

BLOCKS_PER_RUN = 64
Copy = Callable[[int], Awaitable[None]]


class Sender:
    """The other process."""

    def __init__(self, num_blocks: int, block_bytes: int, backing: str, planes: Sequence[Plane], **env: str) -> None:
        script = Path(__file__).with_name("transfer_sender.py")
        command = [sys.executable, script, str(num_blocks), str(block_bytes), backing, *(p.name for p in planes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env
        )
        said = self._read()
        self.endpoint, self.raw_port = f"127.0.0.1:{said['port']}", said["raw_port"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.communicate()


class Plan:
    """Everything that copies into one pool."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.size, self.num_blocks = block_bytes, num_blocks
        self.target = make_pool(num_blocks, block_bytes)
        self.me = describe("receiver", num_blocks, block_bytes)
        self.executor = ThreadPoolExecutor(2)
        agent = start_agent([Plane.NIXL], "bench-receiver") if is_installed() else None
        self.pool_server, self.agent = PoolServer(self.target, agent), agent

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)

    def verify(self, start: int, stop: int, digest: int) -> None:
        """The pool of the sender has the same bytes in each block."""
        for i in range(start, stop):
            if checksum_at(block_address(self.target, i), self.size) != digest:
                raise SystemExit(f"block {i} is wrong")

    async def connect(self, sender: Sender, plane: Plane) -> tuple[Copy, BlockReceiver | None]:
        """A pull over this plane, and what reads its blocks (None: they come with the pull)."""
        channel = grpc.aio.insecure_channel(sender.endpoint, options=CHANNEL_OPTIONS)
        client = TransferClient(channel, self.me)
        offer = await client.handshake([plane], boot_id(), os.getpid(), 10)
        receiver = await self.in_thread(open_receiver, offer.planes, offer.pool, self.size, Means(self.agent))
        return partial(self._pull, sender, client, plane, receiver), receiver

    def read(self, receiver: BlockReceiver, digest: int) -> Copy:
        """The plane alone, without a ticket: all blocks are known."""
        blocks = [RemoteBlock(i, 0, digest) for i in range(self.num_blocks)]
        addresses = [block_address(self.target, i) for i in range(self.num_blocks)]

        async def copy(count: int) -> None:
            await self.in_thread(receiver.read, blocks[:count], addresses[:count])

        return copy

    async def _pull(
        self, sender: Sender, client: TransferClient, plane: Plane, receiver: BlockReceiver | None, count: int
    ) -> None:
        ticket = bytes.fromhex(sender.ask(str(count)))
        attached = await client.attach(ticket, 10)
        done = 0
        async for event in client.pull(ticket, attached.epoch, 0, plane):
            if isinstance(event, PulledEnd):
                break
            first, num = event.first_block, len(event.keys)
            if isinstance(event, BlockFrame):
                ids = range(first, first + num)
                await self.in_thread(copy_blocks, self.target.io, ids, memoryview(event.payload), event.checksums)
            else:
                assert receiver is not None
                addresses = [block_address(self.target, first + i) for i in range(num)]
                await self.in_thread(receiver.read, event.blocks, addresses)
            done += num
        await client.release(ticket, attached.epoch, 10)
        if done != count:
            raise SystemExit(f"{done} of {count} blocks came over {plane.name}")

    def memcpy(self, source: KvMemory, digest: int | None) -> Copy:
        async def copy(count: int) -> None:
            await self.in_thread(self._memcpy, source, digest, count)

        return copy

    def _memcpy(self, source: KvMemory, digest: int | None, count: int) -> None:
        for i in range(count):
            ctypes.memmove(block_address(self.target, i), block_address(source, i), self.size)
            if digest is not None:
                self.verify(i, i + 1, digest)

    def raw_tcp(self, connection: socket.socket, digest: int | None) -> Copy:
        async def copy(count: int) -> None:
            await self.in_thread(self._receive, connection, digest, count)

        return copy

    def _receive(self, connection: socket.socket, digest: int | None, count: int) -> None:
        connection.sendall((count * self.size).to_bytes(8, "little"))
        bytes_of = memoryview(self.target.buffer).cast("B")
        for i in range(count):
            block, got = bytes_of[i * self.size : (i + 1) * self.size], 0
            while got < self.size:
                got += connection.recv_into(block[got:])
            if digest is not None:
                self.verify(i, i + 1, digest)

    def grpcio(self, sender: Sender, digest: int | None) -> Copy:
        """Messages as large as the plane's frames, on a channel of its own. Of pagewire only copy and checksum, with a
        digest."""
        channel = grpc.aio.insecure_channel(sender.endpoint, options=CHANNEL_OPTIONS)
        stream = channel.unary_stream("/bench/Stream")
        size = max(1, FRAME_BYTES // self.size) * self.size

        async def copy(count: int) -> None:
            done = 0
            async for message in stream(struct.pack("<QQ", count * self.size, size)):
                if digest is not None:
                    await self.in_thread(self._take, message, done, digest)
                done += len(message)
            if done != count * self.size:
                raise SystemExit(f"{done} of {count * self.size} bytes came")

        return copy

    def _take(self, message: bytes, offset: int, digest: int) -> None:
        begin = offset // self.size
        for i in range(begin, begin + len(message) // self.size):
            piece = np.frombuffer(message, np.uint8, self.size, (i - begin) * self.size)
            ctypes.memmove(block_address(self.target, i), piece.ctypes.data, self.size)
            self.verify(i, i + 1, digest)

    async def nixl_loop(self, sender: Sender, digest: int) -> Copy:
        """What NIXL's examples do: prepared descriptors, one request for a run, poll without a pause."""
        channel = grpc.aio.insecure_channel(sender.endpoint, options=CHANNEL_OPTIONS)
        offer = await TransferClient(channel, self.me).handshake([Plane.NIXL], boot_id(), os.getpid(), 10)
        await channel.close()
        assert self.agent is not None
        remote = self.agent.connect(offer.pool.nixl_metadata).name
        prepared = prepare(self.agent, remote, self.target, offer.pool, self.num_blocks)

        async def copy(count: int) -> None:
            await self.in_thread(self._nixl, prepared, digest, count)

        return copy

    def _nixl(self, prepared: tuple[Any, Any, Any], digest: int, count: int) -> None:
        agent, local, remote = prepared
        for start in range(0, count, BLOCKS_PER_RUN):
            ids = list(range(start, min(start + BLOCKS_PER_RUN, count)))
            handle = agent.make_prepped_xfer("READ", local, ids, remote, ids)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            handle.release()
            self.verify(ids[0], ids[-1] + 1, digest)


def prepare(agent: NixlAgent, name: str, target: KvMemory, pool: SharedPoolInfo, count: int) -> tuple[Any, Any, Any]:
    """NIXL's agent, and prepared descriptors of each block here and there."""
    nixl, size = agent._agent, target.layout.block_bytes
    here = np.array([(target.address + i * size, size, 0) for i in range(count)], np.uint64)
    there = np.array([(pool.pool_address + i * size, size, 0) for i in range(count)], np.uint64)
    return nixl, nixl.prep_xfer_dlist("", here, "DRAM"), nixl.prep_xfer_dlist(name, there, "DRAM")
