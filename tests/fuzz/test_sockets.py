"""Bytes that are no HTTP/2, half HTTP/2, or HTTP/2 with nonsense in it, on every port."""

import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fuzz.conftest import ROLES, Target

NUM_CONNECTIONS = 60  # on each port
NUM_NIGHTLY = 5_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
PATHS = {
    "r0": "/pagewire.v1.InferenceService/Generate",
    "p0": "/pagewire.v1.PrefillService/Prefill",
    "d0": "/pagewire.v1.DecodeService/Session",
}


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame; `length` is what its header claims."""
    claimed = len(payload) if length is None else length
    return struct.pack(">I", claimed)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header(name: str, value: bytes) -> bytes:
    """HPACK: a literal that is not indexed."""
    return b"\x00" + _length(len(name)) + name.encode() + _length(len(value)) + value


def _length(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    out, value = bytearray((127,)), value - 127
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    out.append(value)
    return bytes(out)


def call(path: str, *more: bytes) -> bytes:
    """Opens an RPC on stream 1."""
    block = b"".join(
        (
            header(":method", b"POST"), header(":scheme", b"http"), header(":path", path.encode()),
            header(":authority", b"x"), header("te", b"trailers"), header("content-type", b"application/grpc"), *more,
        )
    )  # fmt: skip
    return PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, block)


Attack = Callable[[random.Random, str], bytes]


def garbage(rng: random.Random, path: str) -> bytes:
    return rng.randbytes(rng.randrange(1, 2000))


def other_protocols(rng: random.Random, path: str) -> bytes:
    return rng.choice(
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00" + rng.randbytes(512), b"PING\r\n", b"\n"]
    )


def garbage_after_the_preface(rng: random.Random, path: str) -> bytes:
    return PREFACE + rng.randbytes(rng.randrange(1, 500))


def random_frames(rng: random.Random, path: str) -> bytes:
    frames = (
        frame(rng.randrange(12), rng.randrange(256), rng.randrange(4), rng.randbytes(rng.randrange(64)))
        for _ in range(rng.randrange(1, 20))
    )
    return call(path) + b"".join(frames)


def truncated(rng: random.Random, path: str) -> bytes:
    whole = call(path) + frame(DATA, END_STREAM, 1, b"\x00\x00\x00\x00\x05hello")
    return whole[: rng.randrange(len(PREFACE), len(whole))]


def lying_lengths(rng: random.Random, path: str) -> bytes:
    """A frame, or a message in it, that claims to be longer than what follows."""
    if rng.random() < 0.5:
        return call(path) + frame(DATA, 0, 1, b"\x00" + rng.randbytes(9), length=rng.randrange(1 << 24))
    claimed = struct.pack(">I", rng.choice([1, 1 << 20, 1 << 30, (1 << 32) - 1]))
    return call(path) + frame(
        DATA, END_STREAM, 1, rng.choice([b"\x00", b"\x01", b"\xff"]) + claimed + rng.randbytes(40)
    )


def huge_headers(rng: random.Random, path: str) -> bytes:
    """Up to a megabyte in one header, in many, or in continuations without end."""
    size = rng.choice([9_000, 70_000, 1_000_000])
    if rng.random() < 0.5:
        return call(path, *(header(f"x-{i}", b"y" * 1000) for i in range(min(size // 1000, 15))))
    pieces = (frame(CONTINUATION, 0, 1, header("x", b"y" * 16_000)) for _ in range(size // 16_000))
    start = frame(HEADERS, 0, 1, header(":method", b"POST"))
    return PREFACE + frame(SETTINGS, 0, 0, b"") + start + b"".join(pieces)


def floods(rng: random.Random, path: str) -> bytes:
    """Many small frames: pings, settings, resets, window updates."""
    ping, settings = frame(PING, 0, 0, bytes(8)), frame(SETTINGS, 0, 0, bytes((0, 4)) + rng.randbytes(4))
    open_and_reset = b"".join(
        frame(HEADERS, END_HEADERS, 2 * i + 3, header(":path", path.encode()))
        + frame(RST_STREAM, 0, 2 * i + 3, bytes(4))
        for i in range(200)
    )
    window = frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")
    return call(path) + rng.choice([ping * 500, settings * 300, open_and_reset, window * 50])


ATTACKS: list[Attack] = [
    garbage, other_protocols, garbage_after_the_preface, random_frames, truncated, lying_lengths, huge_headers, floods,
]  # fmt: skip


def send(port: int, data: bytes, rng: random.Random) -> None:
    """Sends, reads a little, and leaves: with a reset or in good order. Errors are the server's good right."""
    with socket.socket() as connection, suppress(OSError):
        connection.settimeout(2)
        connection.connect(("127.0.0.1", port))
        if rng.random() < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(data)
        connection.settimeout(rng.choice([0.001, 0.02]))
        connection.recv(4096)


def attack(target: Target, number: int, seed: int) -> Iterator[int]:
    """`number` connections to each port; yields now and then. Some are left open for a while."""
    rng = random.Random(seed)
    waiting: list[socket.socket] = []
    for i in range(number):
        for name in ROLES:
            port, data = target.system[name].port, rng.choice(ATTACKS)(rng, PATHS[name])
            if rng.random() < 0.05 and len(waiting) < 100:
                with suppress(OSError):
                    idle = socket.create_connection(("127.0.0.1", port), timeout=2)
                    waiting.append(idle)
                    idle.sendall(data[: rng.randrange(1, 100)])
            else:
                send(port, data, rng)
        if i % 100 == 99:
            yield i + 1
    for name in ROLES:  # while some of them are still there
        with grpc.insecure_channel(target.system[name].endpoint) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for idle in waiting:
        idle.close()


def test_garbage_on_the_sockets(target: Target) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    for _ in attack(target, NUM_CONNECTIONS, seed):
        pass
    target.check()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_much_garbage_on_the_sockets(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    seed, started = random.SystemRandom().randrange(1 << 31), time.monotonic()
    with capsys.disabled():
        print(f"\nsockets: seed {seed}")
        for number in attack(target, NUM_NIGHTLY, seed):
            if number % 1000 == 0:
                print(
                    f"sockets: {number} connections to each port after {time.monotonic() - started:.0f} s", flush=True
                )
                target.check()
    target.check()
