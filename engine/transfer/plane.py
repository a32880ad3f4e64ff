"""What planes share: the memory they read, the blocks they move, the errors they raise, and the receiver's protocol."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.transfer.landing import Landing

BLOCKS_PER_READ = 64  # of a plane that waits for the sender: what is asked for at a time


class Plane(Enum):
    """How block bytes travel; the values are TransferPlane's numbers on the wire."""

    GRPC = 1
    SHM_VM = 2
    SHM_MAP = 3
    SHM_RING = 4
    NIXL = 5
    TCP = 6

    @property
    def waits_for_sender(self) -> bool:
        """A read over it takes as long as the sender lets it."""
        return self in (Plane.NIXL, Plane.TCP)


def plane_of(number: int) -> Plane | None:
    """The plane with this number on the wire; None for one that this version does not know."""
    return next((plane for plane in Plane if plane.value == number), None)


class PlaneUnavailable(Exception):
    """This plane does not reach that peer (any more); another one may."""


class CorruptBlock(Exception):
    """The copy does not have the sender's checksum."""


class StaleBlock(Exception):
    """The slot's generation changed: the sender gave it to somebody else."""


class KvPool(Protocol):
    """The memory of a worker's blocks, as `engine.memory.KvMemory` has it: [num_blocks, block_bytes] uint8.

    Of a pool in device memory `buffer` has no rows.
    """

    @property
    def buffer(self) -> NDArray[np.uint8]: ...
    @property
    def address(self) -> int: ...
    @property
    def fd(self) -> int | None: ...
    @property
    def generations(self) -> NDArray[np.uint64]: ...
    @property
    def generations_address(self) -> int: ...
    @property
    def generations_fd(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class SharedPoolInfo:
    """Where a sender's pool lies; the plain form of the SharedPool message."""

    pid: int
    pool_address: int
    generations_address: int
    pool_bytes: int
    socket_name: str
    token: bytes
    token_address: int
    nixl_metadata: bytes = b""
    tcp_port: int = 0
    tcp_secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """One readable block: its slot in the sender's pool (or ring), the slot's generation, the block's XXH3-64."""

    slot: int
    generation: int
    checksum: int


class BlockReceiver(Protocol):
    """The receiver's side of a one-sided plane to one peer. Methods block; call them from a worker thread."""

    @property
    def plane(self) -> Plane: ...

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        """Copies each block to its address in this process and verifies the copy.

        Raises StaleBlock, CorruptBlock or PlaneUnavailable; then nothing is said about the copies, and bytes may still
        land until `landing.is_over`.
        """

    def close(self) -> None: ...


def is_host_visible(pool: KvPool) -> bool:
    """False for a pool in device memory: its blocks are read and written through a `BlockIo` alone."""
    return len(pool.buffer) > 0


def block_address(pool: KvPool, block_id: int) -> int:
    """Address of a block in this process."""
    return pool.address + block_id * block_bytes(pool)


def block_bytes(pool: KvPool) -> int:
    """Bytes of one block."""
    return int(pool.buffer.shape[1])


def block_view(pool: KvPool, block_id: int, offset: int = 0, num_bytes: int | None = None) -> memoryview:
    """A block's bytes (or a part) without a copy."""
    end = block_bytes(pool) if num_bytes is None else offset + num_bytes
    row: Any = pool.buffer[block_id, offset:end]
    return memoryview(row)
