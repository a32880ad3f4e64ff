"""KV transfer between two processes of one host: every plane, beside a memcpy, a raw TCP socket and NIXL's own loop.

    .venv/bin/python bench/transfer.py --quick        under a minute, prints a table
    .venv/bin/python bench/transfer.py --out FILE     more rounds and a CSV

A `pull` is all that workers do: Attach, one Pull over gRPC, copies and checksums on a thread, Release. The plane's bare
name is its part of it: reading blocks that are known, with generations and checksums. The others copy the same blocks
into the same pool, and checksum the copies where the name says so. All take turns in every round. On a machine with
other load compare ratios of one run: `ratio` is the median over the rounds of GB/s against the row's own limit in that
round (memcpy+xxh3 for shm, socket+xxh3 for tcp and grpc, NIXL's loop for nixl). `CPU s/GB` is of both processes. `one
block` is the median of copying (pulling) one block.
"""

import argparse
import asyncio
import csv
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import numpy as np

from bench.machine import describe as describe_machine
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

BLOCKS_PER_RUN = 64
LATENCIES = 15
Copy = Callable[[int], Awaitable[None]]


@dataclass
class Row:
    """One way to move blocks. `limit` is the row that it is compared with."""

    name: str
    copy: Copy
    limit: str
    sender: "Sender | None"
    gbs: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)


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


async def make_rows(plan: Plan, senders: list[Sender]) -> list[Row]:
    source = make_pool(plan.num_blocks, plan.size, seed=1)
    digest = checksum_at(block_address(source, 0), plan.size)
    nixl = (Plane.NIXL,) if plan.agent is not None else ()
    private = Sender(
        plan.num_blocks, plan.size, "private", [Plane.SHM_VM, Plane.SHM_RING, *nixl, Plane.TCP, Plane.GRPC]
    )
    memfd = Sender(plan.num_blocks, plan.size, "memfd", [Plane.SHM_MAP])
    senders += [private, memfd]
    raw = socket.create_connection(("127.0.0.1", private.raw_port))

    async def planes(sender: Sender, plane: Plane, limit: str, name: str = "") -> list[Row]:
        pull, receiver = await plan.connect(sender, plane)
        name = name or plane.name.lower()
        rows = [Row(f"{name} pull", pull, limit, sender)]
        if receiver is not None and plane is not Plane.SHM_RING:
            rows.insert(0, Row(name, plan.read(receiver, digest), limit, sender))
        return rows

    rows = [
        Row("memcpy", plan.memcpy(source, None), "", None),
        Row("memcpy+xxh3", plan.memcpy(source, digest), "memcpy", None),
        Row("socket", plan.raw_tcp(raw, None), "memcpy", private),
        Row("socket+xxh3", plan.raw_tcp(raw, digest), "memcpy+xxh3", private),
        *await planes(private, Plane.SHM_VM, "memcpy+xxh3"),
        *await planes(memfd, Plane.SHM_MAP, "memcpy+xxh3"),
        *await planes(private, Plane.SHM_RING, "memcpy+xxh3"),
        *await planes(private, Plane.TCP, "socket+xxh3"),
        *await planes(private, Plane.GRPC, "socket+xxh3"),
    ]
    if nixl:
        over_tcp = Sender(plan.num_blocks, plan.size, "private", [Plane.NIXL], UCX_TLS="tcp")
        senders.append(over_tcp)
        for name, sender in (("nixl", private), ("nixl (tcp)", over_tcp)):
            loop = f"{name} loop+xxh3"
            rows.append(Row(loop, await plan.nixl_loop(sender, digest), "memcpy+xxh3", sender))
            rows += await planes(sender, Plane.NIXL, loop, name)
    return rows


async def measure(row: Row, count: int, num_bytes: int) -> None:
    """One copy of `count` blocks, and its CPU time on both sides."""
    before = row.sender.ask("cpu") if row.sender is not None else 0.0
    started_at, cpu = time.perf_counter(), time.process_time()
    await row.copy(count)
    seconds, cpu = time.perf_counter() - started_at, time.process_time() - cpu
    cpu += (row.sender.ask("cpu") if row.sender is not None else 0.0) - before
    row.gbs.append(num_bytes / seconds / 1e9)
    row.cpu.append(cpu / (num_bytes / 1e9))


async def run(num_blocks: int, block_bytes: int, num_rounds: int) -> list[Row]:
    plan, senders = Plan(num_blocks, block_bytes), list[Sender]()
    rows = await make_rows(plan, senders)
    for number in range(num_rounds + 1):
        for row in rows:
            await measure(row, num_blocks, num_blocks * block_bytes)
            if number == 0:
                row.gbs.clear()
                row.cpu.clear()
    for row in rows:
        for _ in range(LATENCIES):
            started_at = time.perf_counter()
            await row.copy(1)
            row.latency.append(time.perf_counter() - started_at)
    await plan.pool_server.close()
    for sender in senders:
        sender.close()
    plan.executor.shutdown()
    return rows


def summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    by_name = {row.name: row for row in rows}
    lines = []
    for row in rows:
        ratio = ""
        if row.limit:
            ratio = f"{statistics.median(a / b for a, b in zip(row.gbs, by_name[row.limit].gbs, strict=True)):.2f}"
        lines.append(
            {
                "way": row.name,
                "GB/s": f"{statistics.median(row.gbs):.2f}",
                "CPU s/GB": f"{statistics.median(row.cpu):.2f}",
                "one block us": f"{statistics.median(row.latency) * 1e6:.0f}",
                "ratio": ratio,
                "to": row.limit,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one block size, 64 MiB, 5 rounds")
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[65536, 294912, 1 << 20], help="multiples of 64")
    parser.add_argument("--pool-bytes", type=int, default=128 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.block_bytes, arguments.pool_bytes, arguments.rounds = [294912], 64 << 20, 5
    lines = []
    machine = describe_machine()
    for size in arguments.block_bytes:
        num_blocks = max(1, arguments.pool_bytes // size)
        print(f"{num_blocks} blocks of {size} bytes, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        for line in summary(asyncio.run(run(num_blocks, size, arguments.rounds))):
            print(f"  {line['way']:<22}" + " ".join(f"{n} {line[n]:>6} " for n in list(line)[1:4]), end=" ")
            print(f"{line['ratio']:>5} of {line['to']}" if line["to"] else "")
            lines.append({"block_bytes": str(size), **line, **machine})
    if arguments.out is not None:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
