"""KV transfer between two processes of one host: every plane, beside a memcpy, a raw TCP socket and NIXL's own loop.

    .venv/bin/python bench/transfer.py --quick        under a minute, prints a table
    .venv/bin/python bench/transfer.py --out FILE     more rounds and a CSV

A `pull` is all that workers do: Attach, one Pull over gRPC, copies and checksums on a thread, Release. The plane's bare
name is its part of it: reading blocks that are known, with generations and checksums. The others copy the same blocks
into the same pool, and checksum the copies where the name says so. All take turns in every round. On a machine with
other load compare ratios of one run: `ratio` is the median over the rounds of GB/s against the row's own limit in that
round (memcpy+xxh3 for shm, socket+xxh3 for tcp and grpc, NIXL's loop for nixl); `grpc pull` is also compared with what
grpcio does alone with messages of that size. `CPU s/GB` is of both processes. `one block` is the median of copying
(pulling) one block.
"""

import argparse
import asyncio
import csv
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import describe as describe_machine
from bench.transfer_sender import make_pool
from bench.transfer_ways import Copy, Plan, Sender
from engine.transfer.checksum import checksum_at
from engine.transfer.plane import Plane, block_address
from pagewire.free_memory import keep_free_memory

LATENCIES = 15


@dataclass
class Row:
    """One way to move blocks. `limits` are the rows that it is compared with."""

    name: str
    copy: Copy
    limits: tuple[str, ...]
    sender: Sender | None
    gbs: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)


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

    async def planes(sender: Sender, plane: Plane, *limits: str, name: str = "") -> list[Row]:
        pull, receiver = await plan.connect(sender, plane)
        name = name or plane.name.lower()
        rows = [Row(f"{name} pull", pull, limits, sender)]
        if receiver is not None and plane is not Plane.SHM_RING:
            rows.insert(0, Row(name, plan.read(receiver, digest), limits, sender))
        return rows

    rows = [
        Row("memcpy", plan.memcpy(source, None), (), None),
        Row("memcpy+xxh3", plan.memcpy(source, digest), ("memcpy",), None),
        Row("socket", plan.raw_tcp(raw, None), ("memcpy",), private),
        Row("socket+xxh3", plan.raw_tcp(raw, digest), ("memcpy+xxh3",), private),
        Row("grpcio alone", plan.grpcio(private, None), ("socket",), private),
        Row("grpcio alone+xxh3", plan.grpcio(private, digest), ("socket+xxh3",), private),
        *await planes(private, Plane.SHM_VM, "memcpy+xxh3"),
        *await planes(memfd, Plane.SHM_MAP, "memcpy+xxh3"),
        *await planes(private, Plane.SHM_RING, "memcpy+xxh3"),
        *await planes(private, Plane.TCP, "socket+xxh3"),
        *await planes(private, Plane.GRPC, "socket+xxh3", "grpcio alone+xxh3"),
    ]
    if nixl:
        over_tcp = Sender(plan.num_blocks, plan.size, "private", [Plane.NIXL], UCX_TLS="tcp")
        senders.append(over_tcp)
        for name, sender in (("nixl", private), ("nixl (tcp)", over_tcp)):
            loop = f"{name} loop+xxh3"
            rows.append(Row(loop, await plan.nixl_loop(sender, digest), ("memcpy+xxh3",), sender))
            rows += await planes(sender, Plane.NIXL, loop, name=name)
    return rows


def chosen(rows: list[Row], ways: str) -> list[Row]:
    """Those that match, and what they are compared with."""
    names = {row.name for row in rows if re.search(ways, row.name)}
    for row in reversed(rows):  # limits come first
        names |= set(row.limits) if row.name in names else set()
    return [row for row in rows if row.name in names]


async def measure(row: Row, count: int, num_bytes: int) -> None:
    """One copy of `count` blocks, and its CPU time on both sides."""
    before = row.sender.ask("cpu") if row.sender is not None else 0.0
    started_at, cpu = time.perf_counter(), time.process_time()
    await row.copy(count)
    seconds, cpu = time.perf_counter() - started_at, time.process_time() - cpu
    cpu += (row.sender.ask("cpu") if row.sender is not None else 0.0) - before
    row.gbs.append(num_bytes / seconds / 1e9)
    row.cpu.append(cpu / (num_bytes / 1e9))


async def run(num_blocks: int, block_bytes: int, num_rounds: int, ways: str) -> list[Row]:
    plan, senders = Plan(num_blocks, block_bytes), list[Sender]()
    rows = chosen(await make_rows(plan, senders), ways)
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
        for limit in row.limits or ("",):
            ratios = [a / b for a, b in zip(row.gbs, by_name[limit].gbs, strict=True)] if limit else []
            lines.append(
                {
                    "way": row.name,
                    "GB/s": f"{statistics.median(row.gbs):.2f}",
                    "CPU s/GB": f"{statistics.median(row.cpu):.2f}",
                    "one block us": f"{statistics.median(row.latency) * 1e6:.0f}",
                    "ratio": f"{statistics.median(ratios):.2f}" if ratios else "",
                    "to": limit,
                }
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one block size, 64 MiB, 5 rounds")
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[65536, 294912, 1 << 20], help="multiples of 64")
    parser.add_argument("--pool-bytes", type=int, default=128 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--ways", default="", help="only rows whose name matches this regular expression, and their limits"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--append", action="store_true", help="to what --out has: one block size after the other")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.block_bytes, arguments.pool_bytes, arguments.rounds = [294912], 64 << 20, 5
    keep_free_memory()  # as workers do
    lines = []
    machine = describe_machine()
    for size in arguments.block_bytes:
        num_blocks = max(1, arguments.pool_bytes // size)
        print(f"{num_blocks} blocks of {size} bytes, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        for line in summary(asyncio.run(run(num_blocks, size, arguments.rounds, arguments.ways))):
            print(f"  {line['way']:<22}" + " ".join(f"{n} {line[n]:>6} " for n in list(line)[1:4]), end=" ")
            print(f"{line['ratio']:>5} of {line['to']}" if line["to"] else "")
            lines.append({"block_bytes": str(size), **line, **machine})
    if arguments.out is not None:
        with arguments.out.open("a" if arguments.append else "w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            if not file.tell():
                writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
