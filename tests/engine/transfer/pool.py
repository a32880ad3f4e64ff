"""A KvPool for tests: random blocks in anonymous memory or in a memfd."""

import mmap
import os

import numpy as np
from numpy.typing import NDArray


class Pool:
    """[num_blocks, block_bytes] of random bytes and their generations."""

    def __init__(self, num_blocks: int, block_bytes: int, *, memfd: bool = False, seed: int = 0) -> None:
        self.fd = os.memfd_create("test-pool") if memfd else None
        self.generations_fd = os.memfd_create("test-generations") if memfd else None
        self._maps = [_map(self.fd, num_blocks * block_bytes), _map(self.generations_fd, num_blocks * 8)]
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._maps[0], np.uint8).reshape(num_blocks, block_bytes)
        self.generations: NDArray[np.uint64] = np.frombuffer(self._maps[1], np.uint64)
        self.buffer[:] = np.random.default_rng(seed).integers(0, 256, self.buffer.shape, np.uint8)
        self.generations[:] = np.arange(num_blocks) + 1

    @property
    def address(self) -> int:
        return self.buffer.ctypes.data

    @property
    def generations_address(self) -> int:
        return self.generations.ctypes.data

    def close(self) -> None:
        del self.buffer, self.generations
        self._maps.clear()
        for fd in (self.fd, self.generations_fd):
            if fd is not None:
                os.close(fd)


def _map(fd: int | None, num_bytes: int) -> mmap.mmap:
    if fd is None:
        return mmap.mmap(-1, num_bytes)
    os.ftruncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes)
