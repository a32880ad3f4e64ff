"""Plane TCP: right bytes, wrong ones noticed, and nothing for who does not know the secret or speaks no TLS."""

import hashlib
import random
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engine.transfer.tcp_read
import engine.transfer.tcp_server
import engine.transfer.tcp_wire
from engine.transfer.checksum import checksum
from engine.transfer.landing import Landing
from engine.transfer.negotiate import Means, open_receiver
from engine.transfer.plane import (
    CorruptBlock,
    Plane,
    PlaneUnavailable,
    RemoteBlock,
    SharedPoolInfo,
    StaleBlock,
    block_address,
    block_view,
)
from engine.transfer.tcp_read import TcpReceiver
from engine.transfer.tcp_server import TcpServer
from engine.transfer.tcp_wire import TcpSettings, dial
from pagewire.config import ConfigError
from pagewire.ports import BindError
from pagewire.tls import TlsFiles
from tests.certificates import make_authority, make_certificate
from tests.engine.transfer.pool import Pool
from tests.ports import free_port

NUM_BLOCKS, BLOCK_BYTES = 150, 5000


class Pair:
    """A sender and receivers of one process."""

    def __init__(self, settings: TcpSettings, block_bytes: int = BLOCK_BYTES) -> None:
        self.source, self.target = Pool(NUM_BLOCKS, block_bytes, seed=1), Pool(NUM_BLOCKS, block_bytes, seed=2)
        self.server = TcpServer(self.source, settings)
        self.server.start()
        self.receivers: list[TcpReceiver] = []

    @property
    def info(self) -> SharedPoolInfo:
        size = self.source.buffer.nbytes
        return SharedPoolInfo(0, 0, 0, size, "", b"", 0, tcp_port=self.server.port, tcp_secret=self.server.secret)

    def open(self, tls: Callable[[], ssl.SSLContext] | None = None) -> TcpReceiver:
        receiver = open_receiver([Plane.TCP], self.info, self.source.buffer.shape[1], Means(tls=tls))
        assert isinstance(receiver, TcpReceiver)
        self.receivers.append(receiver)
        return receiver

    def blocks(self, *ids: int) -> list[RemoteBlock]:
        return [RemoteBlock(i, int(self.source.generations[i]), checksum(block_view(self.source, i))) for i in ids]

    def addresses(self, *ids: int) -> list[int]:
        return [block_address(self.target, i) for i in ids]

    def read(self, receiver: TcpReceiver, ids: list[int], landing: Landing | None = None) -> None:
        receiver.read(self.blocks(*ids), self.addresses(*range(len(ids))), landing)

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.server.close()
        self.server.close()
        assert self.server.num_connections == 0
        self.source.close()
        self.target.close()


@contextmanager
def pair(settings: TcpSettings | None = None, block_bytes: int = BLOCK_BYTES) -> Iterator[Pair]:
    """Afterwards no connection is left, nor a thread (tests/conftest.py)."""
    both = Pair(settings or TcpSettings(), block_bytes)
    try:
        yield both
    finally:
        both.close()


def test_copies_the_blocks_near_and_far():
    with pair() as both:
        receiver = both.open()
        for ids, into in (((7, 0, 11), (3, 4, 9)), ((5, 6, 7, 149), (20, 21, 22, 23)), (range(5, 145), range(140))):
            receiver.read(both.blocks(*ids), both.addresses(*into))
            assert np.array_equal(both.target.buffer[list(into)], both.source.buffer[list(ids)])
        untouched = Pool(NUM_BLOCKS, BLOCK_BYTES, seed=2)
        assert np.array_equal(both.target.buffer[140:], untouched.buffer[140:])
        untouched.close()
        assert both.server.num_connections == 1


def test_reads_at_the_same_time_have_a_connection_each_and_keep_it():
    with pair(block_bytes=1 << 20) as both:
        receiver = both.open()
        for _ in range(2):
            threads = [threading.Thread(target=both.read, args=(receiver, list(range(60)))) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert np.array_equal(both.target.buffer[:60], both.source.buffer[:60])
        assert 1 < both.server.num_connections <= 3


def test_corrupt_and_stale_blocks_leave_the_connection_in_step():
    with pair() as both:
        receiver = both.open()
        (good,), here = both.blocks(5), both.addresses(0)
        for _ in range(3):
            with pytest.raises(CorruptBlock):
                receiver.read([replace(good, checksum=good.checksum ^ 1)], here)
            with pytest.raises(StaleBlock):
                receiver.read([replace(good, generation=good.generation + 1)], here)
            receiver.read([good], here)
        assert both.server.num_connections == 1


def test_a_stale_block_is_not_even_sent():
    with pair() as both:
        receiver = both.open()
        blocks = both.blocks(5)
        both.source.generations[5] += 1
        before = both.target.buffer.copy()
        with pytest.raises(StaleBlock):
            receiver.read(blocks, both.addresses(0))
        assert np.array_equal(both.target.buffer, before)


def test_a_block_reallocated_while_it_is_sent_is_stale(monkeypatch):
    with pair() as both:
        receiver, blocks = both.open(), both.blocks(4, 5)
        pieces = both.server._pieces

        def pieces_then_reallocate(slots):
            yield from pieces(slots)
            both.source.generations[5] += 1

        monkeypatch.setattr(both.server, "_pieces", pieces_then_reallocate)
        with pytest.raises(StaleBlock):
            receiver.read(blocks, both.addresses(0, 1))


def request(*slots: int, count: int | None = None) -> bytes:
    return struct.pack("<I", len(slots) if count is None else count) + b"".join(struct.pack("<IQ", s, 1) for s in slots)


@pytest.mark.parametrize("wanted", [request(NUM_BLOCKS), request(0, 1 << 31), request(count=0), request(count=65)])
def test_the_sender_refuses_nonsense(wanted):
    with pair() as both, dial("127.0.0.1", both.server.port, both.server.secret, None) as connection:
        connection.sendall(wanted)
        assert connection.recv(1) == b""
        until(lambda: not both.server.num_connections)
        both.read(both.open(), [3])


def test_random_requests_of_who_knows_the_secret_break_nothing():
    rng = random.Random(0)
    with pair() as both:
        for _ in range(100):
            with dial("127.0.0.1", both.server.port, both.server.secret, None) as connection:
                count = rng.choice([rng.randrange(1, 65), rng.getrandbits(32)])
                connection.sendall(struct.pack("<I", count) + rng.randbytes(rng.randrange(1000)))
        until(lambda: not both.server.num_connections)
        both.read(both.open(), [3])


def test_a_slot_outside_the_pool_is_not_asked_for():
    with pair() as both:
        receiver = both.open()
        for slot in (NUM_BLOCKS, 1 << 31, -1):
            with pytest.raises(PlaneUnavailable, match=f"slot {slot} is not one of the {NUM_BLOCKS}"):
                receiver.read([*both.blocks(5), RemoteBlock(slot, 1, 0)], both.addresses(0, 1))
        both.read(receiver, [5])


def test_half_a_request_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(engine.transfer.tcp_wire, "STALL_SECONDS", 0.1)
    with pair() as both, dial("127.0.0.1", both.server.port, both.server.secret, None) as connection:
        time.sleep(0.3)
        connection.sendall(request(3)[:9])  # silent before is no fault, silent within is
        assert connection.recv(1) == b""
        until(lambda: not both.server.num_connections)


def test_a_slow_reader_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(engine.transfer.tcp_server, "STALL_SECONDS", 0.2)
    with pair(block_bytes=1 << 20) as both:
        connection = dial("127.0.0.1", both.server.port, both.server.secret, None)
        wanted = both.blocks(*range(60))
        connection.sendall(engine.transfer.tcp_wire.pack_request(wanted))
        until(lambda: not both.server.num_connections)
        connection.close()
        both.read(both.open(), [3])


def test_strangers_do_not_fill_the_log(monkeypatch, caplog):
    with pair() as both, caplog.at_level("INFO"):
        for count in range(1, 21):
            with socket.create_connection(("127.0.0.1", both.server.port)):
                pass
            until(lambda count=count: both.server.num_turned_away == count)
        assert caplog.text.count("away") == 1
        monkeypatch.setattr(engine.transfer.tcp_server, "_LOG_EVERY_SECONDS", 0.0)  # a minute later
        with socket.create_connection(("127.0.0.1", both.server.port)):
            pass
        until(lambda: caplog.text.count("away") == 2)
        assert "(21 strangers so far)" in caplog.text
        known = dial("127.0.0.1", both.server.port, both.server.secret, None)
        known.sendall(request(count=0))
        until(lambda: "a connection to plane TCP from 127.0.0.1 ended: it asks for 0 blocks" in caplog.text)
        known.close()


def test_strangers_get_nothing(monkeypatch):
    monkeypatch.setattr(engine.transfer.tcp_wire, "HELLO_SECONDS", 0.3)
    with pair() as both:
        with pytest.raises(PlaneUnavailable, match="closed the connection"):
            dial("127.0.0.1", both.server.port, b"guessed" * 5, None)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 64, b"x" * 100_000):
            with socket.create_connection(("127.0.0.1", both.server.port)) as stranger:
                assert len(stranger.recv(100)) == 32, "a nonce"
                stranger.sendall(garbage)
                until(lambda: not both.server.num_connections)
        both.read(both.open(), [3])


def test_an_answer_is_good_for_one_connection(monkeypatch):
    """Who has overheard the greeting of one connection cannot make another with it."""
    monkeypatch.setattr(engine.transfer.tcp_wire, "HELLO_SECONDS", 1.0)
    with pair() as both:
        said = []
        sendall = socket.socket.sendall
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "sendall", lambda s, data: (said.append(bytes(data)), sendall(s, data)))
            both.open()
        (answer,) = [data for data in said if len(data) == 64]
        with socket.create_connection(("127.0.0.1", both.server.port)) as stranger:
            stranger.recv(32)
            stranger.sendall(answer)
            assert stranger.recv(1) == b""


class Impostor:
    """Listens where the sender did, and does what `act` does with each connection."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._act, self._listener = act, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._act(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def test_another_process_at_the_port_is_noticed_and_learns_no_secret(monkeypatch):
    monkeypatch.setattr(engine.transfer.tcp_wire, "HELLO_SECONDS", 0.3)
    heard = bytearray()

    def pretend(connection: socket.socket) -> None:
        connection.sendall(b"n" * 32)
        heard.extend(connection.recv(1000))
        connection.sendall(hashlib.sha256(b"a guess").digest())

    with pair() as both:
        impostor = Impostor(pretend)
        info = replace(both.info, tcp_port=impostor.port)
        with pytest.raises(PlaneUnavailable, match="another process answers"):
            open_receiver([Plane.TCP], info, BLOCK_BYTES)
        assert len(heard) == 64
        assert both.server.secret not in heard
        impostor.close()
        silent = Impostor(lambda _: time.sleep(0.5))
        with pytest.raises(PlaneUnavailable, match="timed out"):
            open_receiver([Plane.TCP], replace(info, tcp_port=silent.port), BLOCK_BYTES)
        silent.close()
        with pytest.raises(PlaneUnavailable, match="refused"):
            open_receiver([Plane.TCP], replace(info, tcp_port=free_port()), BLOCK_BYTES)
        assert open_receiver([Plane.TCP, Plane.GRPC], replace(info, tcp_port=0), BLOCK_BYTES) is None


class Hesitant:
    """A sender that stops in the middle of an answer until it is told to go on."""

    def __init__(self, both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        pieces = both.server._pieces

        def hesitate(slots):
            first, *others = pieces(slots)
            yield first
            self.go_on.wait(30)
            yield from others

        monkeypatch.setattr(both.server, "_pieces", hesitate)


def test_a_read_that_is_stopped_ends_and_nothing_lands_behind_it(monkeypatch):
    with pair() as both:
        receiver, sender, landing = both.open(), Hesitant(both, monkeypatch), Landing()
        threading.Timer(0.1, landing.stop).start()
        with pytest.raises(PlaneUnavailable, match="was stopped"):
            both.read(receiver, [3, 9], landing)
        assert landing.is_over
        assert np.array_equal(both.target.buffer[0], both.source.buffer[3]), "the first piece had come"
        both.target.buffer[:] = 0
        sender.go_on.set()
        until(lambda: not both.server.num_connections)
        assert not both.target.buffer.any()
        both.read(receiver, [3])


def test_a_silent_sender_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(engine.transfer.tcp_read, "STALL_SECONDS", 0.3)
    with pair() as both:
        receiver, sender = both.open(), Hesitant(both, monkeypatch)
        with pytest.raises(PlaneUnavailable, match=r"silent for 0\.3 s"):
            both.read(receiver, [3, 9])
        sender.go_on.set()


def test_a_sender_that_trickles_is_not_waited_for(monkeypatch):
    """A byte now and then is no silence, but it is no transfer either."""
    monkeypatch.setattr(engine.transfer.tcp_wire, "STALL_SECONDS", 0.3)  # of the whole answer
    stop = threading.Event()

    def trickle(slots):
        for _ in range(500):
            if not stop.wait(0.01):
                yield memoryview(b"x")

    with pair(block_bytes=100_000) as both:
        receiver = both.open()
        monkeypatch.setattr(both.server, "_pieces", trickle)
        with pytest.raises(PlaneUnavailable, match=r"did not send all of it in 0\.491 s"):
            both.read(receiver, [3, 9])
        stop.set()


def read_for_ever(both: Pair, receiver: TcpReceiver) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        both.read(receiver, [3, 9])


def test_a_sender_that_closes_in_the_middle_is_noticed(monkeypatch):
    with pair() as both:
        receiver, sender = both.open(), Hesitant(both, monkeypatch)
        closing = threading.Timer(0.1, lambda: (sender.go_on.set(), both.server.close()))
        closing.start()
        with pytest.raises(PlaneUnavailable):
            read_for_ever(both, receiver)
        closing.join()
        with pytest.raises(PlaneUnavailable):
            both.read(receiver, [3])
        receiver.close()
        with pytest.raises(PlaneUnavailable, match="closed"):
            both.read(receiver, [3])


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(engine.transfer.tcp_server, "_MAX_CONNECTIONS", 2)
    with pair() as both:
        first, _ = both.open(), both.open()
        with pytest.raises(PlaneUnavailable):
            both.open()
        first.close()
        until(lambda: both.server.num_connections == 1)
        both.read(both.open(), [3])


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_who_knows_the_secret_and_asks_for_nothing_keeps_no_place(
    speaks_tls: bool, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen worker's kernel answers keepalives for it; when it wakes up it dials anew."""
    monkeypatch.setattr(engine.transfer.tcp_wire, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(engine.transfer.tcp_read, "IDLE_SECONDS", 0.2)
    mine = files(certificates)
    settings = TcpSettings(server_tls=mine.watch_context("KV transfers") if speaks_tls else None)
    with pair(settings) as both:
        receiver = both.open(mine.client_context if speaks_tls else None)
        both.read(receiver, [3])
        until(lambda: not both.server.num_connections)
        both.read(receiver, [4])
        assert both.server.num_connections == 1


def test_a_receiver_uses_no_connection_that_its_sender_may_be_hanging_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as both:
        receiver = both.open()
        (old,) = [connection for connection, _ in receiver._idle]
        monkeypatch.setattr(engine.transfer.tcp_read, "IDLE_SECONDS", 0.0)
        both.read(receiver, [3])
        assert old.fileno() < 0
        monkeypatch.setattr(engine.transfer.tcp_read, "IDLE_SECONDS", 1000.0)
        (young,) = [connection for connection, _ in receiver._idle]
        both.read(receiver, [4])
        assert [connection for connection, _ in receiver._idle] == [young]


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_strangers_hold_no_place_against_who_knows_the_secret(
    speaks_tls: bool, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They dial and say nothing, more of them than there are places."""
    monkeypatch.setattr(engine.transfer.tcp_server, "_MAX_CONNECTIONS", 8)
    monkeypatch.setattr(engine.transfer.tcp_server, "_MAX_STRANGERS", 4)
    monkeypatch.setattr(engine.transfer.tcp_wire, "HELLO_SECONDS", 30.0)
    mine = files(certificates)
    settings = TcpSettings(server_tls=mine.watch_context("KV transfers") if speaks_tls else None)
    tls = mine.client_context if speaks_tls else None
    with pair(settings) as both:
        known, strangers, accepted, serve = both.open(tls), [], [], both.server._start_serving
        monkeypatch.setattr(both.server, "_start_serving", lambda *some: (serve(*some), accepted.append(some)))
        for count in range(1, 21):
            strangers.append(socket.create_connection(("127.0.0.1", both.server.port)))
            until(lambda count=count: len(accepted) == count and both.server.num_connections <= 5)
        both.read(both.open(tls), [3])
        both.read(known, [4])
        for stranger in strangers:
            stranger.close()


def test_a_thread_that_cannot_be_started_costs_its_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pair() as both:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(PlaneUnavailable):
                both.open()
        until(lambda: not both.server.num_connections)
        both.read(both.open(), [3])


def test_a_port_of_ones_own_choice():
    port = free_port()
    with pair(TcpSettings(port=port)) as both:
        assert both.server.port == port
        with pytest.raises(BindError, match=f"port {port} is in use"):
            TcpServer(both.source, TcpSettings(port=port)).start()
    with pair(TcpSettings(host="::1")) as both, dial("::1", both.server.port, both.server.secret, None) as connection:
        connection.sendall(request(NUM_BLOCKS - 1))
        assert connection.recv(8) == struct.pack("<Q", NUM_BLOCKS)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    for authority in ("ca", "other"):
        make_authority(directory, authority)
        make_certificate(directory, f"worker-{authority}", authority)
    return directory


def files(directory: Path, name: str = "ca", authority: str | None = "ca") -> TlsFiles:
    certificate, key = (directory / f"worker-{name}.{kind}" for kind in ("pem", "key"))
    return TlsFiles(certificate, key, None if authority is None else directory / f"{authority}.pem")


def test_mutual_tls(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.transfer.tcp_wire, "HELLO_SECONDS", 1.0)
    mine = files(certificates)
    with pair(TcpSettings(server_tls=mine.watch_context("KV transfers")), 300_000) as both:
        receiver = both.open(mine.client_context)
        both.read(receiver, list(range(100)))
        assert np.array_equal(both.target.buffer[:100], both.source.buffer[:100])
        with socket.create_connection(("127.0.0.1", both.server.port)) as stranger:
            stranger.settimeout(0.2)
            with pytest.raises(TimeoutError):
                stranger.recv(1)  # no nonce before TLS
        strangers = {
            "plaintext": None,
            "no certificate": TlsFiles(authority=mine.authority).client_context,
            "another authority's": files(certificates, "other").client_context,
            "does not trust us": files(certificates, "ca", "other").client_context,
        }
        for who, tls in strangers.items():
            with pytest.raises(PlaneUnavailable):
                print(who, both.open(tls))
        sender, landing = Hesitant(both, monkeypatch), Landing()
        threading.Timer(0.1, landing.stop).start()
        with pytest.raises(PlaneUnavailable, match="was stopped"):
            both.read(receiver, [3, 9], landing)
        sender.go_on.set()
        both.read(receiver, [3])


def test_renewed_certificates_are_for_who_dials_from_now_on(certificates: Path, tmp_path: Path) -> None:
    """Even of another authority; peers are dialled by address, so no name (SNI) is told."""
    mine = TlsFiles(*(tmp_path / name for name in ("tls.pem", "tls.key", "ca.pem")))

    def install(name: str) -> None:
        for kind in ("pem", "key"):
            shutil.copy(certificates / f"worker-{name}.{kind}", tmp_path / f"tls.{kind}")
        shutil.copy(certificates / f"{name}.pem", tmp_path / "ca.pem")

    install("ca")
    with pair(TcpSettings(server_tls=mine.watch_context("KV transfers"))) as both:
        before = both.open(mine.client_context)
        install("other")

        def can_dial() -> bool:
            with suppress(PlaneUnavailable):
                both.read(both.open(mine.client_context), [3])
                return True
            return False

        until(can_dial)
        with pytest.raises(PlaneUnavailable):
            both.open(files(certificates).client_context)
        both.read(before, [4])


def test_who_speaks_tls_sends_nothing_in_plaintext(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.transfer.tcp_wire, "HELLO_SECONDS", 1.0)
    with pair() as both, pytest.raises(PlaneUnavailable):
        both.open(files(certificates).client_context)


def test_certificates_that_are_being_replaced_cost_the_plane_and_nothing_else() -> None:
    def read() -> ssl.SSLContext:
        raise ConfigError("tls_cert, tls_key, tls_ca: key values mismatch")

    with pair() as both, pytest.raises(PlaneUnavailable, match="key values mismatch"):
        both.open(read)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
