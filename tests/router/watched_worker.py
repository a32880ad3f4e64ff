"""Something that says it is a worker: a WatchWorker service that can go silent, restart, drain and die."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from pagewire import rpc
from pagewire.v1 import worker_pb2, worker_pb2_grpc
from pagewire.worker_view import LoadSnapshot, WorkerDescription, WorkerFingerprint, WorkerRole
from pagewire.worker_view_wire import adapter_to_proto, info_to_proto, load_to_proto
from tests.ports import free_port

_Context = grpc.aio.ServicerContext[Any, Any]


class WatchedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """`start`, `say` loads, `restart` on the same port as another process."""

    def __init__(self, worker_id: str, role: WorkerRole = "decode", *, root: bytes = b"r" * 32) -> None:
        self.description = WorkerDescription(
            worker_id=worker_id,
            incarnation=int.from_bytes(os.urandom(7), "big"),
            role=role,
            endpoint="",
            model="tiny",
            fingerprint=WorkerFingerprint(root, "bm", "float32/reference/avx2/tp1", 4, (1024,)),
            max_model_len=256,
            num_blocks=64,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            vocab_size=256,
        )
        self.load = LoadSnapshot(num_free_blocks=64)
        self.silent = False
        self.without_info = False
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return self.description.endpoint

    async def start(self, port: int | None = None) -> "WatchedWorker":
        self._server = rpc.build_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = rpc.bind(self._server, "127.0.0.1", port or free_port())
        self.description = replace(self.description, endpoint=f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def restart(self) -> None:
        """The same name and port, another process."""
        port = int(self.address.rpartition(":")[2])
        await self.stop()
        self.description = replace(self.description, incarnation=self.description.incarnation + 1)
        await self.start(port)

    def say(self, load: LoadSnapshot) -> None:
        self.load = load
        self._changed.set()

    async def WatchWorker(
        self, request: worker_pb2.WatchWorkerRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.WatchWorkerResponse]:
        response = worker_pb2.WatchWorkerResponse(info=info_to_proto(self.description))
        if self.without_info:
            response.ClearField("info")
        while True:
            if not self.silent:
                response.load.CopyFrom(load_to_proto(self.load))
                response.adapters.adapters.extend(map(adapter_to_proto, self.load.adapters))
                yield response
                response = worker_pb2.WatchWorkerResponse()
            self._changed.clear()
            try:
                async with asyncio.timeout(0.1):
                    await self._changed.wait()
            except TimeoutError:
                continue
