"""Plane SHM_VM, receiver: copies straight out of the sender's pool by process_vm_readv (6 GB/s here, read-only)."""

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence

from engine.transfer.checksum import checksum_at
from engine.transfer.landing import Landing
from engine.transfer.plane import CorruptBlock, Plane, PlaneUnavailable, RemoteBlock, SharedPoolInfo, StaleBlock

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MAX_IOVECS = 512  # the kernel's IOV_MAX is 1024
_HOT_BYTES = 1 << 20


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def allow_readers() -> None:
    """Lets other processes of this user read this one where Yama's ptrace_scope is 1; harmless elsewhere."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


class VmReceiver:
    """Reads a sender's pool by its pid and addresses."""

    plane = Plane.SHM_VM

    def __init__(self, info: SharedPoolInfo, block_bytes: int) -> None:
        self._info = info
        self._block_bytes = block_bytes
        self._num_slots = info.pool_bytes // block_bytes
        if self._read_bytes(info.token_address, len(info.token)) != info.token:
            raise PlaneUnavailable(f"pid {info.pid} is another process here")

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        check_slots(blocks, self._num_slots)
        for some, here in hot_runs(blocks, addresses, self._block_bytes):
            self._check_generations(some)
            self._copy(some, here)
            self._check_generations(some)
            verify_copies(some, here, self._block_bytes)

    def close(self) -> None:
        """Nothing is held."""

    def _copy(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int]) -> None:
        size = self._block_bytes
        local = (_IoVec * len(blocks))(*(_IoVec(address, size) for address in addresses))
        remote = (_IoVec * len(blocks))(*(_IoVec(self._info.pool_address + b.slot * size, size) for b in blocks))
        self._call(local, remote, len(blocks), len(blocks) * size)

    def _check_generations(self, blocks: Sequence[RemoteBlock]) -> None:
        found = (ctypes.c_uint64 * len(blocks))()
        local = (_IoVec * 1)(_IoVec(ctypes.addressof(found), ctypes.sizeof(found)))
        remote = (_IoVec * len(blocks))(*(_IoVec(self._info.generations_address + b.slot * 8, 8) for b in blocks))
        if _readv(self._info.pid, local, 1, remote, len(blocks), 0) != ctypes.sizeof(found):
            raise PlaneUnavailable(_reason(self._info.pid))
        check_generations(blocks, list(found))

    def _read_bytes(self, address: int, num_bytes: int) -> bytes:
        copy = ctypes.create_string_buffer(num_bytes)
        local = (_IoVec * 1)(_IoVec(ctypes.addressof(copy), num_bytes))
        self._call(local, (_IoVec * 1)(_IoVec(address, num_bytes)), 1, num_bytes)
        return copy.raw

    def _call(
        self, local: "ctypes.Array[_IoVec]", remote: "ctypes.Array[_IoVec]", num_vectors: int, num_bytes: int
    ) -> None:
        # A short count is possible between vectors only, when some of the remote range is gone.
        if _readv(self._info.pid, local, num_vectors, remote, num_vectors, 0) != num_bytes:
            raise PlaneUnavailable(_reason(self._info.pid))


def hot_runs(
    blocks: Sequence[RemoteBlock], addresses: Sequence[int], block_bytes: int
) -> Iterator[tuple[Sequence[RemoteBlock], Sequence[int]]]:
    """As many blocks at a time as are still in the core's cache when their copies are verified."""
    step = max(1, min(_MAX_IOVECS, _HOT_BYTES // block_bytes))
    for start in range(0, len(blocks), step):
        yield blocks[start : start + step], addresses[start : start + step]


def check_slots(blocks: Sequence[RemoteBlock], num_slots: int) -> None:
    """Raises PlaneUnavailable for a slot outside the pool: at its address lies something else."""
    for block in blocks:
        if not 0 <= block.slot < num_slots:
            raise PlaneUnavailable(f"slot {block.slot} is not one of the {num_slots} that the sender shares")


def check_generations(blocks: Sequence[RemoteBlock], found: Sequence[int]) -> None:
    """Raises StaleBlock if a slot has been given away."""
    for block, generation in zip(blocks, found, strict=True):
        if block.generation != generation:
            raise StaleBlock(f"slot {block.slot} is of generation {generation}, not {block.generation}")


def verify_copies(blocks: Sequence[RemoteBlock], addresses: Sequence[int], num_bytes: int) -> None:
    """Raises CorruptBlock if a copy's checksum is not the sender's."""
    check_checksums(blocks, (checksum_at(address, num_bytes) for address in addresses))


def check_checksums(blocks: Sequence[RemoteBlock], found: Iterable[int]) -> None:
    """The same, of checksums that were made already."""
    for block, digest in zip(blocks, found, strict=True):
        if block.checksum != digest:
            raise CorruptBlock(f"slot {block.slot} has checksum {digest:016x}, the sender says {block.checksum:016x}")


def _reason(pid: int) -> str:
    number = ctypes.get_errno()
    return f"process_vm_readv of pid {pid}: {os.strerror(number) if number else 'short read'}"
