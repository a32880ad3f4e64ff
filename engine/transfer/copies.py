"""Copies bytes of a frame into the pool and verifies the copy; for transfer threads, both steps release the GIL."""

import ctypes
from collections.abc import Sequence

import numpy as np

from engine.transfer.checksum import checksum_at
from engine.transfer.plane import CorruptBlock, KvPool, block_address, block_bytes


def copy_blocks(pool: KvPool, block_ids: Sequence[int], payload: memoryview, checksums: Sequence[int]) -> None:
    """Copies whole blocks out of a frame and verifies the copies."""
    size = block_bytes(pool)
    for i, (block_id, digest) in enumerate(zip(block_ids, checksums, strict=True)):
        copy_part(block_address(pool, block_id), payload[i * size : (i + 1) * size], digest)


def copy_part(address: int, payload: bytes | memoryview, digest: int) -> None:
    """Copies bytes to an address in the pool and verifies the copy."""
    source = np.frombuffer(payload, np.uint8)
    ctypes.memmove(address, source.ctypes.data, source.nbytes)
    found = checksum_at(address, source.nbytes)
    if found != digest:
        raise CorruptBlock(f"the copy has checksum {found:016x}, the frame says {digest:016x}")
