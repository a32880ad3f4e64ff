"""How many tokens a second one router process relays: detokenization and stop strings included, workers scripted.

    .venv/bin/python bench/router_relay.py --quick        half a minute
    .venv/bin/python bench/router_relay.py --out FILE     more rounds, and a CSV

A scripted decode worker sends one message per step with a token for each stream, a client process reads them all. What
counts is the router's own CPU time per token: `tokens/s of a core` is its inverse, so two cores for three processes do
not matter. Beside it stands `plain`: the same relay with grpc.aio alone, without text, stop strings, retries, metrics.
`--profile FILE` runs the router under cProfile.
"""

import argparse
import asyncio
import csv
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagewire import AsyncClient, rpc
from pagewire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.tiny_tokenizers import byte_level, write_model_directory

VOCAB_SIZE = 300
STOPS = ["never to be seen", "\n\nUser:", "###"]


@dataclass(frozen=True, slots=True)
class Point:
    process: str
    streams: int
    stops: bool
    tokens: int
    router_us_per_token: float
    tokens_per_core_second: float
    router_ms_per_request: float
    ttft_ms_p50: float
    machine: str


class Decoder(worker_pb2_grpc.WorkerServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """A decode worker whose engine costs nothing: every `step_seconds` a token for each request."""

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

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        running: dict[int, list[int]] = {}
        arrived: list[int] = []

        async def read() -> None:
            async for message in requests:
                if message.HasField("start"):
                    start = message.start
                    running[start.handle] = [0, start.decode.request.sampling.max_tokens]
                    arrived.append(start.handle)
                else:
                    running.pop(message.cancel.handle, None)

        reader = asyncio.create_task(read())
        try:
            while True:
                await asyncio.sleep(self._step_seconds)
                accepted = [decode_pb2.SessionAccepted(handle=handle) for handle in arrived]
                arrived.clear()
                handles = list(running)
                if not handles:
                    continue
                rows = [running[handle] for handle in handles]
                ends = [types_pb2.FINISH_REASON_LENGTH if i + 1 >= most else 0 for i, most in rows]
                yield decode_pb2.SessionResponse(
                    accepted=accepted,
                    handles=handles,
                    choices=[0] * len(handles),
                    indexes=[index for index, _ in rows],
                    token_ids=[40 + (7 * handle + 11 * i) % 200 for handle, (i, _) in zip(handles, rows, strict=True)],
                    finish_reasons=ends if any(ends) else [],
                )
                for handle, row, end in zip(handles, rows, ends, strict=True):
                    row[0] += 1
                    if end:
                        running.pop(handle, None)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


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
        while not end:
            index, token, end = await queue.get()
            yield inference_pb2.GenerateResponse(index=index, token_ids=[token], finish_reason=end)
        yield inference_pb2.GenerateResponse(done=True)


async def serve_plain(port: int, decoder: int) -> None:
    server = rpc.build_server()
    rpc.bind(server, "127.0.0.1", port)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(PlainRelay(f"127.0.0.1:{decoder}"), server)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


async def serve_decoder(port: int, step_seconds: float) -> None:
    server = rpc.build_server()
    rpc.bind(server, "127.0.0.1", port)
    decoder = Decoder(f"127.0.0.1:{port}", step_seconds)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(decoder, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decoder, server)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


async def read_streams(target: str, streams: int, tokens: int, stops: list[str]) -> tuple[int, list[float]]:
    """Runs the streams once; the number of tokens read, and each stream's TTFT in ms."""
    ttfts: list[float] = []

    async def one(client: AsyncClient, number: int) -> int:
        began, count = time.perf_counter(), 0
        async for piece in client.generate([5 + number, 6, 7, 8], max_tokens=tokens, temperature=0, stop=stops):
            if piece.token_ids and not count:
                ttfts.append(1e3 * (time.perf_counter() - began))
            count += len(piece.token_ids)
        return count

    async with AsyncClient(target) as client:
        counts = await asyncio.gather(*(one(client, number) for number in range(streams)))
    return sum(counts), ttfts


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--decoder", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, default=8.0)
    options = parser.parse_args()
    if options.plain:
        asyncio.run(serve_plain(options.plain, options.decoder))
        return
    if options.decoder:
        asyncio.run(serve_decoder(options.decoder, options.step_ms / 1e3))
        return
    rounds = 2 if options.quick else 5
    with tempfile.TemporaryDirectory() as directory:
        model = write_model_directory(Path(directory) / "tiny", byte_level(), vocab_size=VOCAB_SIZE,
                                      max_position_embeddings=8192)  # fmt: skip
        decoder_port, port, plain_port = free_port(), free_port(), free_port()
        me = [sys.executable, __file__, "--decoder", str(decoder_port), "--step-ms", str(options.step_ms)]
        decoder = subprocess.Popen(me, stdout=subprocess.PIPE)
        profile = ["-m", "cProfile", "-o", str(options.profile)] if options.profile else []
        command = [sys.executable, *profile, "-m", "pagewire", "router", "--model", str(model), "--port", str(port),
                   "--served-model-name", "tiny", "--decode-workers", f"127.0.0.1:{decoder_port}",
                   "--log-level", "warning"]  # fmt: skip
        router = subprocess.Popen(command, stdout=subprocess.PIPE)
        plain = subprocess.Popen([*me, "--plain", str(plain_port)], stdout=subprocess.PIPE)
        try:
            for process in (plain, decoder, router):
                if process.stdout is None or not process.stdout.readline():
                    sys.exit(f"{process.args} did not start")
            time.sleep(1.0)
            points = [
                measure(name, psutil.Process(process.pid), f"127.0.0.1:{at}", streams, stops, rounds)
                for streams in options.streams
                for name, process, at, stops in (
                    ("plain", plain, plain_port, False),
                    ("router", router, port, False),
                    ("router", router, port, True),
                )
            ]
        finally:
            router.terminate()
            router.wait()
            for process in (decoder, plain):
                process.terminate()
                process.wait()
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Point)])
            writer.writerows(astuple(point) for point in points)


def measure(name: str, router: psutil.Process, target: str, streams: int, stops: bool, rounds: int) -> Point:
    """Medians over rounds; one request's fixed cost is the CPU time of one-token streams."""
    tokens = max(64, 6000 // streams)
    strings = STOPS if stops else []
    asyncio.run(read_streams(target, streams, 16, strings))
    per_token, per_request, ttfts, count = [], [], [], 0
    for _ in range(rounds):
        start = cpu_seconds(router)
        for _ in range(max(1, 64 // streams)):
            asyncio.run(read_streams(target, streams, 1, strings))
        fixed = (cpu_seconds(router) - start) / (streams * max(1, 64 // streams))
        start = cpu_seconds(router)
        count, times = asyncio.run(read_streams(target, streams, tokens, strings))
        spent = cpu_seconds(router) - start
        per_request.append(1e3 * fixed)
        per_token.append(1e6 * (spent - fixed * streams) / max(1, count - streams))
        ttfts += times
    us = statistics.median(per_token)
    machine = f"{os.cpu_count()} x {platform.processor() or platform.machine()}"
    point = Point(
        name, streams, stops, count, us, 1e6 / us, statistics.median(per_request), statistics.median(ttfts), machine
    )
    print(
        f"{name:6s} {streams:4d} streams, stop strings {'on ' if stops else 'off'}: {us:6.1f} µs/token = "
        f"{point.tokens_per_core_second:7.0f} tokens/s of a core, {point.router_ms_per_request:5.2f} ms a request",
        flush=True,
    )
    return point


if __name__ == "__main__":
    main()
