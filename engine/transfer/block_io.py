"""How the host's threads read and write blocks of a pool, whether its memory is the host's or a device's.

host memory     the rows are the blocks themselves                        (`HostBlocks`)
device memory   the rows are copies in pinned memory, `most` at a time    (`engine.device_staging.Staging`)
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class BlockIo(Protocol):
    """For threads that may wait for a copy. Rows may be used inside the `with` alone.

    most          blocks that may be asked for at once
    block_bytes   length of a row
    """

    @property
    def are_rows_the_pool(self) -> bool:
        """Rows are the blocks themselves, and nobody waits for them."""
        ...

    @property
    def most(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

    def reading(self, block_ids: Sequence[int]) -> AbstractContextManager[Sequence[Bytes]]:
        """The blocks' bytes. Nobody holds the blocks: the caller does, or looks at their generations afterwards."""
        ...

    def writing(self, block_ids: Sequence[int]) -> AbstractContextManager[Sequence[Bytes]]:
        """Where the blocks' bytes are to be put. After the `with` they are in the pool, if it didn't raise."""
        ...

    def writing_part(self, block_id: int, offset: int, num_bytes: int) -> AbstractContextManager[Bytes]:
        """As `writing`, of a part of one block."""
        ...


class StagedIo(BlockIo, Protocol):
    """Of a pool in device memory."""

    @property
    def num_busy(self) -> int:
        """Lanes whose rows somebody has."""
        ...

    def step_launched(self) -> None:
        """On the device thread: copies that are asked for from now on wait for what was launched so far."""
        ...

    def close(self) -> None:
        """Raises AssertionError if somebody still has rows."""
        ...


class HostBlocks:
    """Of `buffer` [num_blocks, block_bytes]."""

    are_rows_the_pool = True
    most = sys.maxsize

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer
        self.block_bytes = int(buffer.shape[1])

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[Sequence[Bytes]]:
        yield [self._buffer[block_id] for block_id in block_ids]

    @contextmanager
    def writing(self, block_ids: Sequence[int]) -> Iterator[Sequence[Bytes]]:
        yield [self._buffer[block_id] for block_id in block_ids]

    @contextmanager
    def writing_part(self, block_id: int, offset: int, num_bytes: int) -> Iterator[Bytes]:
        yield self._buffer[block_id, offset : offset + num_bytes]
