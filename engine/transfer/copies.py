"""Puts what has come from a peer into the pool, verified; for transfer threads, copy and checksum release the GIL."""

from collections.abc import Sequence

import numpy as np

from engine.transfer.block_io import BlockIo, Bytes
from engine.transfer.checksum import checksum
from engine.transfer.landing import Landing
from engine.transfer.plane import BlockReceiver, CorruptBlock, RemoteBlock


def copy_blocks(pool: BlockIo, block_ids: Sequence[int], payload: memoryview, checksums: Sequence[int]) -> None:
    """Copies whole blocks out of a frame and verifies the copies."""
    blocks = np.frombuffer(payload, np.uint8).reshape(-1, pool.block_bytes)
    with pool.writing(block_ids) as rows:
        for row, block, digest in zip(rows, blocks, checksums, strict=True):
            _copy(block, row, digest)


def copy_part(pool: BlockIo, block_id: int, offset: int, payload: bytes | memoryview, digest: int) -> None:
    """Copies bytes into a part of a block and verifies the copy."""
    with pool.writing_part(block_id, offset, len(payload)) as part:
        _copy(np.frombuffer(payload, np.uint8), part, digest)


def read_blocks(
    pool: BlockIo, receiver: BlockReceiver, blocks: Sequence[RemoteBlock], block_ids: Sequence[int], landing: Landing
) -> None:
    """Reads a peer's blocks into these; raises as `receiver.read`. A lane of staging doesn't wait for a peer."""
    if receiver.plane.waits_for_sender and not pool.are_rows_the_pool:
        copies = np.empty((len(block_ids), pool.block_bytes), np.uint8)
        receiver.read(blocks, [copy.ctypes.data for copy in copies], landing)
        with pool.writing(block_ids) as rows:
            for row, copy in zip(rows, copies, strict=True):
                row[:] = copy
        return
    with pool.writing(block_ids) as rows:
        receiver.read(blocks, [row.ctypes.data for row in rows], landing)


def copy_out(pool: BlockIo, block_ids: Sequence[int]) -> tuple[list[Bytes], list[int]]:
    """Copies of blocks, and the copies' checksums."""
    with pool.reading(block_ids) as rows:
        copies = [row.copy() for row in rows]
    return copies, [checksum(copy.data) for copy in copies]


def _copy(source: Bytes, target: Bytes, digest: int) -> None:
    target[:] = source
    found = checksum(target.data)
    if found != digest:
        raise CorruptBlock(f"the copy has checksum {found:016x}, the frame says {digest:016x}")
