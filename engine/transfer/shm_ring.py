"""Plane SHM_RING: the sender copies blocks into a small shared ring, the receiver copies them out and acknowledges.

The ring is a memfd of the sender, mapped read-only by receivers. Acknowledgements, (slot u32, generation u64) each, go
over the Unix socket that handed it out. A slot that is never acknowledged is freed when its pull ends; whoever reads it
later sees another generation.

    sender:   take a free slot → generation += 1 → copy → BlocksReady{slot, generation, checksum} … ack → free
    receiver: generation? → copy → generation? → checksum? → ack
"""

import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.transfer.landing import Landing
from engine.transfer.plane import Plane, PlaneUnavailable, RemoteBlock, SharedPoolInfo
from engine.transfer.shm_map import ASK_RING, MappedBlocks, connect

ACK = struct.Struct("<IQ")


class SendRing:
    """The sender's ring. Not thread-safe: one event loop owns it."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self.data_fd = _memfd("pagewire-ring", num_slots * block_bytes)
        self.generations_fd = _memfd("pagewire-ring-generations", num_slots * 8)
        data = mmap.mmap(self.data_fd, num_slots * block_bytes)
        generations = mmap.mmap(self.generations_fd, num_slots * 8)
        self._data: NDArray[np.uint8] | None = np.frombuffer(data, np.uint8).reshape(num_slots, block_bytes)
        self._generations: NDArray[np.uint64] | None = np.frombuffer(generations, np.uint64)
        self._free = deque(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def put(self, block: NDArray[np.uint8]) -> tuple[int, int]:
        """Copies a block in; returns (slot, generation). The ring must have a free slot."""
        if self._data is None or self._generations is None:
            raise PlaneUnavailable("closed")
        slot = self._free.popleft()
        self._generations[slot] += np.uint64(1)
        np.copyto(self._data[slot], block)
        return slot, int(self._generations[slot])

    def holds(self, slot: int, generation: int) -> bool:
        """True while the slot has what was put into it under this generation."""
        return self._generations is not None and slot < self.num_slots and int(self._generations[slot]) == generation

    def free(self, slot: int, generation: int) -> bool:
        """Frees a slot that still has this generation (acknowledged, or its pull ended); else changes nothing."""
        if self._generations is None or not self.holds(slot, generation):
            return False
        self._generations[slot] += np.uint64(1)
        self._free.append(slot)
        return True

    def close(self) -> None:
        """Unmaps and closes; receivers' mappings live on, harmless."""
        if self._data is None:
            return
        self._data = self._generations = None
        os.close(self.data_fd)
        os.close(self.generations_fd)


class RingReceiver:
    """Reads blocks out of a sender's ring."""

    plane = Plane.SHM_RING

    def __init__(self, info: SharedPoolInfo, block_bytes: int) -> None:
        self._socket, data_fd, generations_fd = connect(info, ASK_RING)
        self._ack_lock = threading.Lock()
        try:
            self._blocks = MappedBlocks(data_fd, generations_fd, block_bytes)
        except PlaneUnavailable:
            self._socket.close()
            raise
        finally:
            os.close(data_fd)
            os.close(generations_fd)

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        self._blocks.read(blocks, addresses)
        try:
            with self._ack_lock:
                self._socket.sendall(b"".join(ACK.pack(block.slot, block.generation) for block in blocks))
        except OSError as error:
            raise PlaneUnavailable(f"ring socket: {error.strerror or error}") from None

    def close(self) -> None:
        self._socket.close()
        self._blocks.close()


def _memfd(name: str, num_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd
