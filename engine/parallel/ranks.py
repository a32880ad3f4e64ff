"""The other ranks as rank 0 sees them: started, connected, told what to do, watched, taken down."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.errors import EngineDied, ModelError
from engine.memory import KvMemory
from engine.models.decoder import Decoder, Model
from engine.parallel.connection import limit_sending, shut_down, socket_of
from engine.parallel.devices import between_devices, placing
from engine.parallel.group import STEP_SECONDS, RankGroup
from engine.parallel.heads import KvHeads
from engine.parallel.launch import Launcher, RankProcess
from engine.parallel.machines import Machines
from engine.parallel.meeting import meeting
from engine.parallel.messages import Failed, Join, Load, Loaded, Stop, encode, last_words, receive, send
from engine.parallel.model import ParallelModel
from engine.parallel.remote_kv import RemoteKv
from pagewire.config import EngineOptions

START_SECONDS = 120.0
"""For a process to start and connect; loading is not counted."""
LOAD_SECONDS = 600.0
"""For ranks to load what is left to load when rank 0 has its own part, which is no smaller than theirs."""
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0

logger = logging.getLogger(__name__)


class Ranks:
    """Ranks 1 … size - 1. They load their parts while rank 0 loads its own: then `wait_loaded` and `join`."""

    def __init__(self, options: EngineOptions, launcher: Launcher) -> None:
        self._launcher = launcher
        self._size, self._options = options.tensor_parallel_size, options.model_dump()
        names = {rank: launcher.machine(rank) for rank in range(1, self._size)}
        self.machines = Machines(names, options.has_device_pool)
        self._processes: dict[int, RankProcess] = {}
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._pids: dict[int, int] = {}
        self.loaded: dict[int, Loaded] = {}
        self._has_joined = False
        self._backend = options.distributed_executor_backend
        self._give_up: Callable[[], None] = lambda: None
        """Ends what rank 0 waits for in the ranks' group."""
        self._lock = threading.Lock()
        """Over `_is_closing` with what is begun unless it is set, and over `_death` with `_on_death`."""
        self._is_closing = False
        self._death: EngineDied | None = None
        self._on_death: Callable[[BaseException], None] = lambda error: None
        self._died = threading.Event()
        self._start_error: Exception | None = None
        self._threads: list[threading.Thread] = []
        try:
            for rank in range(1, self._size):
                self._processes[rank] = launcher.start(rank)
            self._run("ranks-start", self._start)
        except BaseException:
            self.close()
            raise

    @property
    def on_death(self) -> Callable[[BaseException], None]:
        """Is called once when a rank ends by itself: on a thread of its own, or at once if one has ended already."""
        return self._on_death

    @on_death.setter
    def on_death(self, on_death: Callable[[BaseException], None]) -> None:
        with self._lock:
            self._on_death = on_death
            death = self._death
        if death is not None:
            on_death(death)

    def wait_loaded(self, digest: bytes) -> None:
        """Until all have loaded. Raises ModelError if one can't, or has read other weights than those of `digest`.

        Raises EngineDied if one dies, or is not done LOAD_SECONDS from now, when rank 0 is.
        """
        starting = self._threads[0]
        starting.join(LOAD_SECONDS)
        if starting.is_alive():
            late = sorted(self._processes.keys() - self.loaded.keys())
            raise EngineDied(f"ranks {late} have not loaded their parts {LOAD_SECONDS:g} s after rank 0")
        if self._start_error is not None:
            raise self._start_error
        self.machines.check_weights(self.loaded, digest, self._options["model"])

    def join(self, model: Model, memory: KvMemory, vocab_size: int) -> ParallelModel:
        """The whole model, once all have loaded. Raises EngineDied if one dies."""
        if not isinstance(model, Decoder) or model.config.shard is None:
            raise ValueError("ranks share a model's shards")
        shard = model.config.shard
        self.machines.check_classes(self.loaded, model.numerics_class)
        tellers, elsewhere = self.machines.tellers(shard), self.machines.heads_elsewhere(shard)
        group = between_devices(self._meet(memory, tells=bool(tellers)), model.kernels)
        logger.info("tensor parallelism: %d ranks, others are processes %s", self._size, sorted(self._pids.values()))
        heads = KvHeads(memory.blocks, memory.layout, memory.groups, shard.kv_heads)
        remote = RemoteKv(memory, elsewhere, tellers, self.tell_one, group, heads) if elsewhere else None
        place = placing(model.kernels, model.config, memory.layout)
        return ParallelModel(model, heads, vocab_size, group, self, remote, place)

    def _meet(self, memory: KvMemory, *, tells: bool = False) -> RankGroup:
        """A rank that dies meanwhile is noticed at once."""
        elsewhere, with_own_pools = self.machines.elsewhere, self.machines.with_own_pools
        if memory.fd is None and len(with_own_pools) < len(self._connections):
            raise ValueError("ranks of one machine share a pool in a memfd")
        with meeting(self._backend, self._size, self._launcher.host if elsewhere else None) as place:
            here = Join(memory.num_blocks, memory.layout, memory.groups, place.place, tells=tells)
            for rank, connection in self._connections.items():
                if rank in with_own_pools:
                    self._invite(rank, connection, replace(here, shares_pool=False), place.descriptors)
                elif memory.fd is not None:
                    self._invite(rank, connection, here, (memory.fd, *place.descriptors))
            self._has_joined = True
            self._give_up = place.give_up
            self._run("ranks-watch", self._watch)
            try:
                return place.group()
            except Exception as error:
                raise self.lost(error) from error

    def _invite(self, rank: int, connection: "Connection[Any, Any]", message: Join, descriptors: Sequence[int]) -> None:
        try:
            send(connection, message)
            if descriptors:
                with socket_of(connection) as own:
                    socket.send_fds(own, [b"\0"], descriptors)
        except OSError:
            raise EngineDied(self._why(rank)) from None

    def tell(self, message: object) -> None:
        """Sends it to each. Raises EngineDied, also if one reads nothing for STEP_SECONDS."""
        data = encode(message)
        for rank in self._connections:
            self._send(rank, data)

    def tell_each(self, message: Callable[[int], object]) -> None:
        """The same with a message for each rank; all are made before the first is sent: all ranks get one, or none."""
        data = {rank: encode(message(rank)) for rank in self._connections}
        for rank, of_rank in data.items():
            self._send(rank, of_rank)

    def tell_one(self, rank: int, message: object) -> None:
        """The same to one."""
        self._send(rank, encode(message))

    def _send(self, rank: int, data: bytes) -> None:
        if self._death is not None:
            raise self._death
        try:
            self._connections[rank].send_bytes(data)
        except BlockingIOError:
            raise self.lost(TimeoutError(f"rank {rank} has read nothing for {STEP_SECONDS:g} s")) from None
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> EngineDied:
        """The rank that has ended, or `error` itself if none has."""
        if not self._is_closing:
            self._died.wait(_END_SECONDS)
        return self._die(f"a step over {self._size} ranks has failed: {type(error).__name__}: {error}")[0]

    def _die(self, reason: str) -> tuple[EngineDied, Callable[[BaseException], None] | None]:
        """The death that was first, and whom to tell of it if it is this one."""
        with self._lock:
            if self._death is not None:
                return self._death, None
            self._death = EngineDied(reason)
            return self._death, self._on_death

    def kill(self) -> None:
        """Ends a step that waits for a rank that hangs: it raises EngineDied. From any thread; then `close`."""
        with self._lock:
            self._is_closing = True
        logger.error("a step over %d ranks does not end; they are killed", self._size)
        for process in list(self._processes.values()):
            process.kill()
        self._give_up()

    def close(self) -> None:
        """Ends all of them. Idempotent."""
        with self._lock:
            self._is_closing = True
            connections = dict(self._connections)
        with ExitStack() as closing:  # from the last on, each whatever happens to the others
            closing.callback(self._launcher.close)
            closing.callback(self._disconnect)
            for process in self._processes.values():
                closing.callback(process.kill)
            if self._has_joined and self._death is None:
                self._stop(connections)

    def _stop(self, connections: "Mapping[int, Connection[Any, Any]]") -> None:
        """Those that still read end by themselves, within _END_SECONDS in all."""
        for connection in connections.values():
            with suppress(OSError):
                limit_sending(connection, _END_SECONDS / self._size)
                send(connection, Stop())
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes.values():
            process.how_it_ended(max(0.0, deadline - time.monotonic()))

    def _disconnect(self) -> None:
        """Ends the threads. No connection is added any more."""
        for connection in list(self._connections.values()):  # a killed actor's process may go later
            with suppress(OSError):
                shut_down(connection)
        for thread in self._threads:
            thread.join()
        for connection in self._connections.values():
            connection.close()
        self._connections, self._processes = {}, {}

    def _run(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _start(self) -> None:
        try:
            self._accept()
            level = logging.getLogger().getEffectiveLevel()
            for rank, connection in self._connections.items():
                try:
                    send(connection, Load(self._options, self.machines.num_sharing(rank), level))
                except OSError:
                    raise EngineDied(self._why(rank)) from None
            self._await_loaded()
        except Exception as error:
            self._start_error = error

    def _accept(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while len(self._connections) < self._size - 1:
            for rank, process in self._processes.items():
                if rank not in self._connections and (ended := process.how_it_ended(0.0)) is not None:
                    raise EngineDied(f"rank {rank} ended at its start with {ended}; the log has its own words")
            if time.monotonic() > deadline:
                late = sorted(self._processes.keys() - self._connections.keys())
                raise EngineDied(f"ranks {late} did not start within {START_SECONDS:g} s")
            arrival = self._launcher.accept(_POLL_SECONDS)
            with self._lock:
                if self._is_closing:
                    if arrival is not None:
                        arrival.connection.close()
                    raise EngineDied("the ranks are closed")
                if arrival is not None:
                    connection: Connection[Any, Any] = Connection(arrival.connection.detach())
                    limit_sending(connection, STEP_SECONDS)
                    self._pids[arrival.rank] = arrival.pid
                    self._connections[arrival.rank] = connection

    def _await_loaded(self) -> None:
        waiting = {connection: rank for rank, connection in self._connections.items()}
        while waiting:
            for connection in wait(list(waiting)):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answer = receive(connection)
                except (EOFError, OSError):
                    raise EngineDied(self._how_it_died(rank)) from None
                if isinstance(answer, Failed):
                    raise (ModelError if answer.is_expected else EngineDied)(f"rank {rank}: {answer.reason}")
                if not isinstance(answer, Loaded):
                    raise EngineDied(f"rank {rank} answered {type(answer).__name__}")
                self.loaded[rank] = answer

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        ready = wait(list(ranks))
        if self._is_closing:
            return
        reason = self._why(next(ranks[each] for each in ready if isinstance(each, Connection)))
        if self._is_closing:
            return
        death, on_death = self._die(reason)
        self._died.set()
        self._give_up()
        logger.critical("%s; a model on %d ranks can't go on without it", reason, self._size)
        if on_death is not None:
            on_death(death)

    def _why(self, rank: int) -> str:
        """Its last words if it has said some, else how its process has ended."""
        words = last_words(self._connections[rank])
        return self._how_it_died(rank) if words is None else f"rank {rank} {words}"

    def _how_it_died(self, rank: int) -> str:
        ended = self._processes[rank].how_it_ended(_END_SECONDS) or "its connection closed"
        name = self.machines.names[rank]
        return f"rank {rank} (process {self._pids[rank]}{name and f' on {name}'}) has died: {ended}"
