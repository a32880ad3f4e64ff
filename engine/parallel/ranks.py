"""The other ranks as rank 0 sees them: started, connected, told what to do, watched, taken down."""

import logging
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from engine.errors import EngineDied
from engine.memory import KvMemory
from engine.model_config import ModelError
from engine.models.decoder import Decoder, Model
from engine.parallel.heads import KvHeads
from engine.parallel.launch import Launcher, RankProcess
from engine.parallel.messages import Failed, Join, Load, Loaded, Stop, encode, receive, send
from engine.parallel.model import ParallelModel
from engine.parallel.process_ranks import ProcessRanks
from engine.parallel.rank import TOKEN_BYTES
from pagewire.config import EngineOptions

START_SECONDS = 120.0
"""For a process to start and connect; loading is not counted."""
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0
_CREDENTIALS = struct.Struct("3i")

logger = logging.getLogger(__name__)


class Ranks:
    """Ranks 1 … size - 1. They load their parts while rank 0 loads its own, until `join`.

    `on_death` is called once, on a thread of its own, when one ends by itself.
    """

    def __init__(self, options: EngineOptions, launcher: Launcher, threads: int) -> None:
        self.on_death: Callable[[BaseException], None] = lambda error: None
        self._launcher = launcher
        self._size = options.tensor_parallel_size
        self._load = Load(options.model_dump(), threads, logging.getLogger().getEffectiveLevel())
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._processes: dict[int, RankProcess] = {}
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._pids: dict[int, int] = {}
        self._has_joined = False
        self._is_closing = False
        self._death: EngineDied | None = None
        self._died = threading.Event()
        self._start_error: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            address = f"pagewire-ranks-{os.getpid()}-{secrets.token_hex(8)}"
            self._listener.bind("\0" + address)
            self._listener.listen()
            for rank in range(1, self._size):
                self._processes[rank] = launcher.start(rank, address, self._token)
            self._run("ranks-start", self._start)
        except BaseException:
            self.close()
            raise

    def join(self, model: Model, memory: KvMemory, vocab_size: int) -> ParallelModel:
        """The whole model, once all have loaded. Raises ModelError if a rank can't."""
        self._threads[0].join()
        if self._start_error is not None:
            raise self._start_error
        if memory.fd is None or not isinstance(model, Decoder) or model.config.shard is None:
            raise ValueError("ranks share a model's shards and a pool in a memfd")
        with tempfile.TemporaryDirectory(prefix="pagewire-ranks-") as directory:
            meeting = Path(directory) / "meeting"
            for connection in self._connections.values():
                send(connection, Join(memory.num_blocks, memory.layout, memory.groups, str(meeting)))
                with socket.socket(fileno=os.dup(connection.fileno())) as own:
                    socket.send_fds(own, [b"\0"], [memory.fd])
            self._has_joined = True
            self._run("ranks-watch", self._watch)
            try:
                group = ProcessRanks(meeting, 0, self._size)
            except Exception as error:
                raise self.lost(error) from error
        logger.info(
            "tensor parallelism: %d ranks, the others are processes %s", self._size, sorted(self._pids.values())
        )
        heads = KvHeads(memory.blocks, memory.layout, memory.groups, model.config.shard.kv_heads)
        return ParallelModel(model, heads, vocab_size, group, self)

    def tell(self, message: object) -> None:
        """Sends it to each. Raises EngineDied."""
        if self._death is not None:
            raise self._death
        data = encode(message)
        try:
            for connection in self._connections.values():
                connection.send_bytes(data)
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> EngineDied:
        """The rank that has ended, or `error` itself if none has."""
        self._died.wait(_END_SECONDS)
        if self._death is None:
            self._death = EngineDied(f"a step over {self._size} ranks has failed: {type(error).__name__}: {error}")
        return self._death

    def close(self) -> None:
        """Ends all of them. Idempotent."""
        self._is_closing = True
        self._listener.close()
        if self._has_joined:
            with suppress(EngineDied):
                self.tell(Stop())
        for process in self._processes.values():
            if self._has_joined:
                process.how_it_ended(_END_SECONDS)
            process.kill()
        for connection in self._connections.values():  # a killed actor's process may go later
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        self._launcher.close()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _start(self) -> None:
        try:
            self._accept()
            for connection in self._connections.values():
                send(connection, self._load)
            for rank, connection in self._connections.items():
                self._await_loaded(rank, connection)
        except Exception as error:
            self._start_error = error

    def _accept(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        self._listener.settimeout(_POLL_SECONDS)
        while len(self._connections) < self._size - 1:
            for rank, process in self._processes.items():
                if rank not in self._connections and (ended := process.how_it_ended(0.0)) is not None:
                    raise EngineDied(f"rank {rank} ended at its start with {ended}; the log has its own words")
            if time.monotonic() > deadline:
                late = sorted(self._processes.keys() - self._connections.keys())
                raise EngineDied(f"ranks {late} did not start within {START_SECONDS:g} s")
            with suppress(TimeoutError):
                self._welcome(self._listener.accept()[0])

    def _welcome(self, peer: socket.socket) -> None:
        """A process of this user that knows the token is the rank it says."""
        with peer:
            peer.settimeout(START_SECONDS)
            uid = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
            hello = peer.recv(TOKEN_BYTES + 8, socket.MSG_WAITALL)
            if uid != os.getuid() or not secrets.compare_digest(hello[:TOKEN_BYTES], self._token):
                return
            rank = int.from_bytes(hello[TOKEN_BYTES : TOKEN_BYTES + 4], "little")
            self._pids[rank] = int.from_bytes(hello[TOKEN_BYTES + 4 :], "little")
            peer.setblocking(True)
            self._connections[rank] = Connection(peer.detach())

    def _await_loaded(self, rank: int, connection: "Connection[Any, Any]") -> None:
        try:
            answer = receive(connection)
        except (EOFError, OSError):
            raise EngineDied(self._how_it_died(rank)) from None
        if isinstance(answer, Failed):
            raise (ModelError if answer.is_expected else EngineDied)(f"rank {rank}: {answer.reason}")
        if not isinstance(answer, Loaded):
            raise EngineDied(f"rank {rank} answered {type(answer).__name__}")

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        ready = wait(list(ranks))
        if self._is_closing:
            return
        connection = next(each for each in ready if isinstance(each, Connection))
        rank = ranks[connection]
        try:
            reason = f"rank {rank} has failed: {receive(connection).reason}"
        except (EOFError, OSError):
            reason = self._how_it_died(rank)
        if self._is_closing:
            return
        self._death = EngineDied(reason)
        self._died.set()
        logger.critical("%s; a model on %d ranks can't go on without it", reason, self._size)
        self.on_death(self._death)

    def _how_it_died(self, rank: int) -> str:
        ended = self._processes[rank].how_it_ended(_END_SECONDS) or "its connection closed"
        return f"rank {rank} (process {self._pids[rank]}) has died: {ended}"
