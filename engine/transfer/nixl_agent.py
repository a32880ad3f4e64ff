"""This worker's NIXL agent (extra `nixl`): shares memory with other agents and reads theirs, through UCX.

A READ that was posted cannot be taken back: over TCP its bytes land even after its handle was released and the remote
agent removed. So a pending read keeps its handle, its agent and (see `Landing`) its target until it is over.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.transfer.landing import Landing
from engine.transfer.nixl_load import make_agent
from engine.transfer.nixl_posted import NixlRead, Remote
from engine.transfer.plane import PlaneUnavailable

logger = logging.getLogger(__name__)

READ_SECONDS = 10.0
ROW_WORDS = 512
_NUM_ROWS = 32
_LEAST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
_PAUSE_SHARE = 1 / 32  # of the time that a read has taken: so much longer it takes, at most


class Region(NamedTuple):
    """Bytes at an address of this process or, for the far side of a read, of a peer; as NIXL wants it."""

    address: int
    num_bytes: int
    device: int = 0


class NixlAgent:
    """One per worker process; `name` is unique among all. Thread-safe, methods block for milliseconds at most.

    Raises PlaneUnavailable if there is no usable NIXL.
    """

    def __init__(self, name: str) -> None:
        self._scratch = np.zeros((_NUM_ROWS, ROW_WORDS), np.uint64)
        self._scratch_address = self._scratch.ctypes.data
        self._rows: SimpleQueue[int] = SimpleQueue()
        for row in range(_NUM_ROWS):
            self._rows.put(row)
        self._lock = threading.RLock()
        self._remotes: dict[bytes, Remote] = {}
        self._registered: list[Any] = []
        self._lent_rows: list[tuple[int, Landing]] = []
        self._is_closed = False
        self.metadata = b""
        try:
            self._agent: Any = make_agent(name)
            self._register([Region(self._scratch_address, self._scratch.nbytes)])
        except PlaneUnavailable:
            raise
        except Exception as error:
            raise PlaneUnavailable(f"NIXL does not start: {error}") from error

    @property
    def num_remotes(self) -> int:
        """Agents that are connected, or were and have reads pending."""
        self._sweep()
        return len(self._remotes)

    @property
    def num_pending(self) -> int:
        """Reads that are not known to be over."""
        return sum(len(remote.pending) for remote in list(self._remotes.values()))

    @property
    def num_free_rows(self) -> int:
        return self._rows.qsize()

    def share(self, regions: Sequence[Region]) -> None:
        """Registers memory: this agent may read into it, and whoever has `metadata` may read it. Once.

        Raises PlaneUnavailable if the memory cannot be registered (RLIMIT_MEMLOCK, no memory).
        """
        try:
            registered = self._register(regions)
            self.metadata = bytes(self._agent.get_partial_agent_metadata(registered, True, ["UCX"]))
        except Exception as error:
            num_bytes = sum(region.num_bytes for region in regions)
            raise PlaneUnavailable(f"NIXL does not register {num_bytes} bytes: {error}") from error

    def connect(self, metadata: bytes) -> Remote:
        """The agent that this metadata is of, with one user more; ends with `disconnect`. Raises PlaneUnavailable."""
        self._sweep()
        with self._lock:
            if self._is_closed:
                raise PlaneUnavailable("the NIXL agent is closed")
            remote = self._remotes.get(metadata)
            if remote is None:
                try:
                    name = self._agent.add_remote_agent(metadata)
                except Exception as error:
                    raise PlaneUnavailable(f"NIXL takes no such agent: {error}") from None
                remote = Remote(name.decode() if isinstance(name, bytes) else str(name), metadata)
                self._remotes[metadata] = remote
            if remote.is_broken:
                raise PlaneUnavailable(f"the connection to NIXL agent {remote.name} broke")
            remote.num_users += 1
            return remote

    def disconnect(self, remote: Remote) -> None:
        """One user less. The last one ends the connection, as soon as no read is pending."""
        self._sweep()
        with self._lock:
            remote.num_users -= 1
            self._remove_if_unused(remote)

    def read(
        self,
        remote: Remote,
        targets: Sequence[Region],
        sources: Sequence[Region],
        landing: Landing,
        seconds: float = READ_SECONDS,
        stop: Landing | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies each source of the peer into the target of the same size, and calls `meanwhile` on the way. Raises
        PlaneUnavailable.

        It ends early when `stop` (else `landing`) is stopped. Whenever it raises, `landing` says when the targets are
        free. A peer that takes too long is not read from again over this connection.
        """
        stop = landing if stop is None else stop
        if stop.is_stopped:
            raise PlaneUnavailable(f"a read from NIXL agent {remote.name} was stopped")
        read = self._post(remote, targets, sources)
        meanwhile()
        began = time.monotonic()
        deadline = began + seconds
        while not read.is_over():
            is_late = time.monotonic() > deadline
            if is_late or stop.is_stopped or read.error is not None:
                landing.leave(read.is_over)
                remote.is_broken = remote.is_broken or is_late
                reason = "was stopped" if stop.is_stopped else f"took longer than {seconds:g} s"
                raise PlaneUnavailable(
                    f"a read from NIXL agent {remote.name} {f'failed: {read.error}' if read.error else reason}"
                )
            time.sleep(min(max(_LEAST_PAUSE, (time.monotonic() - began) * _PAUSE_SHARE), _LONGEST_PAUSE))
        if read.error is not None:
            raise PlaneUnavailable(f"a read from NIXL agent {remote.name} failed: {read.error}")

    def read_words(
        self,
        remote: Remote,
        sources: Sequence[Region],
        seconds: float = READ_SECONDS,
        stop: Landing | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> NDArray[np.uint64]:
        """The u64 words of the sources, one after another, `ROW_WORDS` at most. Raises PlaneUnavailable.

        It ends early when `stop` is stopped; where the words would have landed is not the caller's concern. `meanwhile`
        as for `read`.
        """
        self._sweep()
        try:
            number = self._rows.get_nowait()
        except Empty:
            raise PlaneUnavailable("too many reads are pending") from None
        position, targets, landing = self._scratch_address + number * ROW_WORDS * 8, list[Region](), Landing()
        for source in sources:
            targets.append(Region(position, source.num_bytes))
            position += source.num_bytes
        try:
            self.read(remote, targets, sources, landing, seconds, stop, meanwhile)
            words: NDArray[np.uint64] = self._scratch[number, : sum(source.num_bytes for source in sources) // 8].copy()
            return words
        finally:
            if landing.is_over:
                self._rows.put(number)
            else:
                with self._lock:
                    self._lent_rows.append((number, landing))

    def poll(self, handle: Any) -> bool:
        """True if a transfer is done; raises what NIXL raises if it failed."""
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise PlaneUnavailable("NIXL reports an error")
        return bool(state == "DONE")

    def forget(self, remote: Remote, read: NixlRead) -> None:
        """A read is over."""
        with self._lock:
            remote.pending.discard(read)
            self._remove_if_unused(remote)

    def close(self) -> None:
        """Ends every read, connection and registration; afterwards nothing is written. Idempotent."""
        with self._lock:
            self._is_closed = True
            pending = [read for remote in self._remotes.values() for read in remote.pending]
        for read in pending:
            read.abandon()
        with self._lock:
            for remote in list(self._remotes.values()):
                remote.num_users = 0
                self._remove_if_unused(remote)
            for registered in reversed(self._registered):
                try:
                    self._agent.deregister_memory(registered)
                except Exception as error:
                    logger.info("NIXL did not take memory back: %s", error)
            self._registered.clear()
            self._lent_rows.clear()
            self._agent = None  # its last reference: sockets, threads and UCX's memory go

    def _sweep(self) -> None:
        """Takes back the rows of reads that are over by now."""
        if not self._lent_rows:
            return
        with self._lock:
            lent, self._lent_rows = self._lent_rows, []
        for number, landing in lent:
            if landing.is_over:
                self._rows.put(number)
            else:
                with self._lock:
                    self._lent_rows.append((number, landing))

    def _register(self, regions: Sequence[Region]) -> Any:
        registered = self._agent.register_memory([(r.address, r.num_bytes, 0, "") for r in regions], "DRAM")
        self._registered.append(registered)
        return registered

    def _post(self, remote: Remote, targets: Sequence[Region], sources: Sequence[Region]) -> NixlRead:
        with self._lock:
            if self._is_closed:
                raise PlaneUnavailable("the NIXL agent is closed")
            if remote.is_broken:
                raise PlaneUnavailable(f"the connection to NIXL agent {remote.name} broke")
            agent = self._agent
        try:
            handle = agent.initialize_xfer("READ", _descs(agent, targets), _descs(agent, sources), remote.name)
        except Exception as error:
            raise PlaneUnavailable(f"NIXL cannot read from agent {remote.name}: {error}") from None
        read = NixlRead(self, remote, handle)
        with self._lock:
            remote.pending.add(read)
        try:
            is_done = agent.transfer(handle) == "DONE"
        except Exception as error:
            read.failed(error)  # some of its descriptors may have been posted
        else:
            if is_done:
                read.done()
        return read

    def _remove_if_unused(self, remote: Remote) -> None:
        if remote.num_users or remote.pending or self._remotes.get(remote.metadata) is not remote:
            return
        del self._remotes[remote.metadata]
        try:
            self._agent.remove_remote_agent(remote.name)
        except Exception as error:
            logger.info("NIXL agent %s could not be removed: %s", remote.name, error)


def _descs(agent: Any, regions: Sequence[Region]) -> Any:
    return agent.get_xfer_descs(np.array(regions, np.uint64), "DRAM")
