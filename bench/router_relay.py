"""How many tokens a second one router process relays: detokenization and stop strings included, workers scripted.

    python -m bench.router_relay --quick        a minute
    python -m bench.router_relay --csv FILE     more rounds, and a CSV

A scripted decode worker sends one message per step with a token for each stream, a client process reads them all. What
counts is the router's own CPU time per token: `tokens/s of a core` is its inverse, so two cores for three processes do
not matter. Beside it stands `plain`: the same relay with grpc.aio alone, without text, stop strings, retries, metrics.

`added` is what a request waits longer for its first token than one that asks the worker itself, by turns, while as many
streams run: medians. `--profile FILE` runs the router under cProfile.
"""

import argparse
import asyncio
import contextlib
import csv
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import describe
from bench.relay_world import VOCAB_SIZE
from pagewire import AsyncClient, rpc
from pagewire.v1 import decode_pb2, decode_pb2_grpc
from tests.tiny_tokenizers import byte_level, write_model_directory

STOPS = ["never to be seen", "\n\nUser:", "###"]
_PROBES = 60
_MOST_PROBED = 32  # streams; with more a request waits for its client, which has to read them all


@dataclass(frozen=True, slots=True)
class Point:
    process: str
    streams: int
    stops: bool
    tokens: int
    us_per_token: float
    tokens_per_core_second: float
    cpu_ms_per_request: float
    added_ms: float


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay under test and the worker behind it."""

    name: str
    pid: int
    target: str
    decoder: str

    def cpu_seconds(self) -> float:
        """Of all its threads, by the clock that clock_getcpuclockid(3) would name; /proc has ticks of 10 ms."""
        return time.clock_gettime(~self.pid << 3 | 2)


async def read_streams(client: AsyncClient, streams: int, tokens: int, stops: Sequence[str]) -> int:
    """Runs the streams once; the number of tokens read."""

    async def one(number: int) -> int:
        count = 0
        async for piece in client.generate([5 + number, 6, 7, 8], max_tokens=tokens, temperature=0, stop=stops):
            count += len(piece.token_ids)
        return count

    return sum(await asyncio.gather(*(one(number) for number in range(streams))))


async def cost(relay: Relay, streams: int, stops: Sequence[str], tokens: int) -> tuple[float, float, int]:
    """CPU seconds (of a token, of a request) and tokens read; a request's are those of one-token streams."""
    async with AsyncClient(relay.target) as client:
        repeats = max(1, 64 // streams)
        started = relay.cpu_seconds()
        for _ in range(repeats):
            await read_streams(client, streams, 1, stops)
        fixed = (relay.cpu_seconds() - started) / (streams * repeats)
        started = relay.cpu_seconds()
        count = await read_streams(client, streams, tokens, stops)
        spent = relay.cpu_seconds() - started
        return (spent - fixed * streams) / max(1, count - streams), fixed, count


async def added_seconds(relay: Relay, streams: int, stops: Sequence[str]) -> float:
    """Median time to the first token through the relay less that of the worker's own, while `streams` run."""
    through, direct = [], []
    request = decode_pb2.DecodeRequest()
    async with AsyncClient(relay.target) as client, rpc.channel(relay.decoder) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        background = asyncio.create_task(read_streams(client, streams, 8000, stops))
        await asyncio.sleep(0.5)
        for _ in range(_PROBES):
            started = time.perf_counter()
            await stub.Decode(request).read()
            direct.append(time.perf_counter() - started)
            started = time.perf_counter()
            async with contextlib.aclosing(client.generate([5, 6, 7], max_tokens=1, stop=stops)) as pieces:
                await anext(pieces)
                through.append(time.perf_counter() - started)
                async for _ in pieces:
                    pass
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
    return statistics.median(through) - statistics.median(direct)


def measure(relay: Relay, streams: int, *, stops: bool, rounds: int) -> Point:
    """Medians over rounds."""
    strings = STOPS if stops else []
    asyncio.run(cost(relay, streams, strings, 16))
    found = [asyncio.run(cost(relay, streams, strings, max(64, min(500, 6000 // streams)))) for _ in range(rounds)]
    added = float("nan")
    if streams <= _MOST_PROBED:
        added = 1e3 * statistics.median(asyncio.run(added_seconds(relay, streams, strings)) for _ in range(rounds))
    us = 1e6 * statistics.median(per_token for per_token, _, _ in found)
    ms = 1e3 * statistics.median(fixed for _, fixed, _ in found)
    print(
        f"{relay.name:6s} {streams:4d} streams, stop strings {'on ' if stops else 'off'}: {us:6.1f} µs/token = "
        f"{1e6 / us:7.0f} tokens/s of a core; a request: {ms:5.2f} ms of CPU, {added:5.2f} ms added",
        flush=True,
    )
    return Point(relay.name, streams, stops, found[0][2], us, 1e6 / us, ms, added)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--step-ms", type=float, default=8.0)
    options = parser.parse_args()
    machine = describe()
    rounds = 2 if options.quick else 5
    with tempfile.TemporaryDirectory() as directory:
        model = write_model_directory(Path(directory) / "tiny", byte_level(), vocab_size=VOCAB_SIZE,
                                      max_position_embeddings=8192)  # fmt: skip
        decoder_port, port, plain_port = (free_port() for _ in range(3))
        decoder, world = f"127.0.0.1:{decoder_port}", [sys.executable, "-m", "bench.relay_world"]
        profile = ["-m", "cProfile", "-o", str(options.profile)] if options.profile else []
        router = [sys.executable, *profile, "-m", "pagewire", "router", "--model", str(model), "--port", str(port),
                  "--served-model-name", "tiny", "--decode-workers", decoder, "--log-level", "warning"]  # fmt: skip
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE)
            for command in (
                [*world, "decoder", str(decoder_port), str(options.step_ms)],
                router,
                [*world, "plain", str(plain_port), str(decoder_port)],
            )
        ]
        try:
            for process in processes:
                if process.stdout is None or not process.stdout.readline():
                    sys.exit(f"{process.args} did not start")
            time.sleep(1.0)
            ours = Relay("router", processes[1].pid, f"127.0.0.1:{port}", decoder)
            plain = Relay("plain", processes[2].pid, f"127.0.0.1:{plain_port}", decoder)
            points = [
                measure(relay, streams, stops=stops, rounds=rounds)
                for streams in options.streams
                for relay, stops in ((plain, False), (ours, False), (ours, True))
            ]
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait()
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*asdict(points[0]), *machine], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**asdict(point), **machine} for point in points)


if __name__ == "__main__":
    main()
