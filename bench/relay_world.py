"""Who stands around the router in `router_relay.py`: a scripted decode worker, and a relay that only relays.

Each is a process of its own: `python -m bench.relay_world decoder PORT STEP_MS`, `… plain PORT DECODERS_PORT`.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

from pagewire import rpc
from pagewire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

VOCAB_SIZE = 300


class Decoder(worker_pb2_grpc.WorkerServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """A decode worker whose engine costs nothing: a first token at once, then one for each request every step."""

    def __init__(self, endpoint: str, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._info = types_pb2.WorkerInfo(
            worker_id="d0", incarnation=secrets.randbits(63), role=types_pb2.WORKER_ROLE_DECODE, endpoint=endpoint,
            model="tiny", max_model_len=8192, num_blocks=1 << 20, max_num_seqs=1024, max_num_batched_tokens=8192,
            vocab_size=VOCAB_SIZE,
            fingerprint=types_pb2.Fingerprint(
                root=b"r" * 32, layout_id="l", numerics_class="n", block_size=16, block_bytes=[64]),
        )  # fmt: skip

    async def WatchWorker(self, request: object, context: object) -> AsyncIterator[worker_pb2.WatchWorkerResponse]:
        load = types_pb2.WorkerLoad(num_free_blocks=1 << 20)
        yield worker_pb2.WatchWorkerResponse(info=self._info, load=load)
        while True:
            await asyncio.sleep(1)
            yield worker_pb2.WatchWorkerResponse(load=load)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: object
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield decode_pb2.DecodeResponse(token=types_pb2.TokenOutput(token_id=40))

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        running: dict[int, list[int]] = {}  # by handle: the next index, how many in all
        arrived: list[int] = []
        arrival = asyncio.Event()

        async def read() -> None:
            async for message in requests:
                if message.HasField("start"):
                    start = message.start
                    running[start.handle] = [0, start.decode.request.sampling.max_tokens]
                    arrived.append(start.handle)
                    arrival.set()
                else:
                    running.pop(message.cancel.handle, None)

        reader = asyncio.create_task(read())
        clock = asyncio.get_running_loop().time
        due = clock()
        try:
            while True:
                try:
                    async with asyncio.timeout_at(due):
                        await arrival.wait()
                    handles = list(arrived)
                except TimeoutError:
                    due += self._step_seconds
                    handles = list(running)
                arrival.clear()
                accepted = [decode_pb2.SessionAccepted(handle=handle) for handle in arrived]
                arrived.clear()
                handles = [handle for handle in handles if handle in running]
                if handles:
                    yield _step(handles, running, accepted)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


def _step(
    handles: list[int], running: dict[int, list[int]], accepted: list[decode_pb2.SessionAccepted]
) -> decode_pb2.SessionResponse:
    """A token for each; those that end with it run no more."""
    rows = [running[handle] for handle in handles]
    ends = [types_pb2.FINISH_REASON_LENGTH if index + 1 >= most else 0 for index, most in rows]
    response = decode_pb2.SessionResponse(
        accepted=accepted,
        handles=handles,
        choices=[0] * len(handles),
        indexes=[index for index, _ in rows],
        token_ids=[40 + (7 * handle + 11 * row[0]) % 200 for handle, row in zip(handles, rows, strict=True)],
        finish_reasons=ends if any(ends) else [],
    )
    for handle, row, end in zip(handles, rows, ends, strict=True):
        row[0] += 1
        if end:
            del running[handle]
    return response


class PlainRelay(inference_pb2_grpc.InferenceServiceServicer):
    """What grpc.aio costs by itself: the token ids of one session, each to its own stream."""

    def __init__(self, decoder: str) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(rpc.channel(decoder))
        self._queues: dict[int, asyncio.Queue[tuple[int, int, int]]] = {}
        self._commands: asyncio.Queue[decode_pb2.SessionRequest] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None

    async def _read(self) -> None:
        async def commands() -> AsyncIterator[decode_pb2.SessionRequest]:
            while True:
                yield await self._commands.get()

        async for response in self._stub.Session(commands()):
            ends = response.finish_reasons or [0] * len(response.handles)
            for handle, index, token, end in zip(
                response.handles, response.indexes, response.token_ids, ends, strict=True
            ):
                self._queues[handle].put_nowait((index, token, end))

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        handle = len(self._queues) + 1
        queue = self._queues[handle] = asyncio.Queue()
        call = types_pb2.WorkerRequest(sampling=request.sampling)
        start = decode_pb2.SessionStart(handle=handle, decode=decode_pb2.DecodeRequest(request=call))
        self._commands.put_nowait(decode_pb2.SessionRequest(start=start))
        end = 0
        try:
            while not end:
                index, token, end = await queue.get()
                yield inference_pb2.GenerateResponse(index=index, token_ids=[token], finish_reason=end)
            yield inference_pb2.GenerateResponse(done=True)
        finally:
            cancel = decode_pb2.SessionCancel(handle=handle)
            self._commands.put_nowait(decode_pb2.SessionRequest(cancel=cancel))


async def _serve(kind: str, port: int, argument: float) -> None:
    server = rpc.build_server()
    rpc.bind(server, "127.0.0.1", port)
    if kind == "plain":
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(PlainRelay(f"127.0.0.1:{argument:.0f}"), server)
    else:
        decoder = Decoder(f"127.0.0.1:{port}", argument / 1e3)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(decoder, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(decoder, server)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
