"""The sending process of `transfer.py`: random blocks behind a real KvTransferService, and a raw TCP socket."""

import argparse
import asyncio
import json
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import numpy as np
import torch

from engine.memory import KvLayout, KvMemory
from engine.transfer.negotiate import start_agent
from engine.transfer.plane import Plane
from engine.transfer.pool_server import PoolServer
from engine.transfer.tcp_server import TcpServer
from engine.transfer.tcp_wire import TcpSettings
from pagewire.free_memory import keep_free_memory
from pagewire.worker_view import WorkerDescription, WorkerFingerprint
from transfer_svc.leases import LeaseTable
from transfer_svc.manifest import describe_blocks
from transfer_svc.sender import KvSender
from transfer_svc.service import KvTransferServicer, add_to_server
from transfer_svc.ticket import PrefillResult

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


class NoCache:
    """The pool's blocks are never reused."""

    def release(self, block_ids: list[int]) -> None: ...


def make_pool(num_blocks: int, block_bytes: int, backing: Any = "private", seed: int | None = None) -> KvMemory:
    """A worker's pool; random bytes if there is a seed, touched in any case."""
    memory = KvMemory(KvLayout(1, 1, block_bytes // 64, 16, torch.bfloat16), num_blocks, backing)
    memory.buffer[:] = 0 if seed is None else np.random.default_rng(seed).integers(0, 256, block_bytes, np.uint8)
    return memory


def describe(worker_id: str, num_blocks: int, block_bytes: int) -> WorkerDescription:
    """Two of these fit."""
    fingerprint = WorkerFingerprint(bytes(32), "bench", "bench", 16, (block_bytes,))
    return WorkerDescription(worker_id, 1, "prefill", "", "bench", fingerprint, 1 << 20, num_blocks, 1, 1, 1000)


def serve_raw(memory: KvMemory) -> int:
    """A thread that sends as many of the pool's bytes as it is asked for; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        everything = memoryview(memory.buffer).cast("B")
        while len(asked := connection.recv(8, socket.MSG_WAITALL)) == 8:
            connection.sendall(everything[: int.from_bytes(asked, "little")])

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def bare_stream(memory: KvMemory) -> grpc.GenericRpcHandler:
    """grpcio alone: as many of the pool's bytes as are asked for, in messages of the size that is asked for."""

    async def stream(request: bytes, _: Any) -> AsyncIterator[bytes]:
        num_bytes, size = struct.unpack("<QQ", request)
        message = bytes(memoryview(memory.buffer).cast("B")[:size])
        for begin in range(0, num_bytes, size):
            yield message if begin + size <= num_bytes else message[: num_bytes - begin]

    return grpc.method_handlers_generic_handler("bench", {"Stream": grpc.unary_stream_rpc_method_handler(stream)})


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("backing")
    parser.add_argument("planes", nargs="+")
    arguments = parser.parse_args()
    keep_free_memory()  # as workers do
    num_blocks, planes = arguments.num_blocks, [Plane[name] for name in arguments.planes]
    memory = make_pool(num_blocks, arguments.block_bytes, arguments.backing, seed=1)
    tcp = TcpServer(memory, TcpSettings()) if Plane.TCP in planes else None
    pool_server = PoolServer(memory, start_agent(planes, f"bench-{secrets.token_hex(4)}"), tcp)
    pool_server.start()
    leases = LeaseTable(600.0, 600.0, secrets.token_bytes)
    cache: Any = NoCache()
    sender = KvSender(leases, cache, time.monotonic, lambda: None)
    lender: Any = None
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    description = describe("sender", num_blocks, arguments.block_bytes)
    add_to_server(KvTransferServicer(sender, lender, pool_server, description, planes), server)
    server.add_generic_rpc_handlers((bare_stream(memory),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    manifest = describe_blocks(memory, range(num_blocks), [bytes(32)] * num_blocks)
    print(json.dumps({"port": port, "raw_port": serve_raw(memory)}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == "cpu\n":
            print(json.dumps(time.process_time()), flush=True)
            continue
        count = int(line)
        ticket = leases.open("bench", count * 16)
        leases.extend(ticket.name, manifest[:count])
        leases.complete(ticket.name, PrefillResult(count * 16, 0, ()), time.monotonic())
        print(json.dumps(ticket.name.hex()), flush=True)
    await server.stop(None)
    await pool_server.close()


if __name__ == "__main__":
    asyncio.run(main())
