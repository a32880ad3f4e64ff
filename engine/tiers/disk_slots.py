"""Slots in a file that survives the process; see `disk_format` for its bytes. All of it is for the tiers' threads."""

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

from engine.tiers.disk_format import (
    FILE_HEADER_BYTES,
    NO_RECORD,
    decode_record,
    encode_record,
    file_header,
    record_bytes,
)
from engine.tiers.tier import Bytes
from engine.transfer.checksum import checksum
from kvstore.tier_block import Entry, TierBlock
from kvstore.tier_book import TierBook

logger = logging.getLogger(__name__)

_FILE_NAME = "blocks.kv"
_MAX_PLACES = 64


class DiskSlots:
    """`size` bytes in a place below `directory` (0/, 1/ …) that no other process has, one with our blocks if there is.

    The lock goes with the process. Blocks of another fingerprint are refused: the file is emptied. Raises OSError.
    """

    def __init__(self, directory: Path, size: int, fingerprint: bytes, block_size: int, block_bytes: int) -> None:
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._record_bytes = record_bytes(block_size)
        self._header = file_header(fingerprint, block_size, block_bytes)
        self.num_slots = (size - FILE_HEADER_BYTES) // self.slot_bytes
        self._sealed: dict[int, bytes] = {}
        self._fd, self.path = self._find_place(directory)
        try:
            self._begin()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def slot_bytes(self) -> int:
        return self._record_bytes + self._block_bytes

    def restore(self, book: TierBook) -> int:
        """Books every block that is whole, parents first; returns how many."""
        found: dict[bytes, tuple[int, TierBlock, int]] = {}
        for slot in range(min(self.num_slots, (os.fstat(self._fd).st_size - FILE_HEADER_BYTES) // self.slot_bytes)):
            record = decode_record(os.pread(self._fd, self._record_bytes, self._offset(slot)), self._block_size)
            if record is not None and record[0].key in found:  # a copy in another slot
                self._unseal(slot)
            elif record is not None:
                found[record[0].key] = (slot, *record)
        children: dict[bytes | None, list[bytes]] = {}
        for key, (_, block, _) in found.items():
            children.setdefault(block.parent, []).append(key)
        keys = list(children.get(None, ()))
        for key in keys:  # grows while it is walked
            slot, block, digest = found[key]
            if book.restore(block, slot, digest):
                self._sealed[slot] = key
                keys += children.get(key, ())
        for slot, _, _ in found.values():
            if slot not in self._sealed:  # behind a parent that is gone
                self._unseal(slot)
        return len(self._sealed)

    def write(self, entry: Entry, source: Bytes) -> int:
        self._unseal(entry.slot)
        self._write(source.data, self._offset(entry.slot) + self._record_bytes)
        return checksum(source.data)

    def seal(self, entry: Entry, checksum: int) -> None:
        self._write(memoryview(encode_record(entry.block, checksum)), self._offset(entry.slot))
        self._sealed[entry.slot] = entry.block.key

    def read(self, entry: Entry, target: Bytes) -> None:
        view, offset = memoryview(target.data), self._offset(entry.slot) + self._record_bytes
        while view:
            num_bytes = os.preadv(self._fd, [view], offset)
            if num_bytes == 0:
                raise OSError(errno.EIO, f"{self.path} ends at byte {offset}")
            view, offset = view[num_bytes:], offset + num_bytes

    def erase(self, is_live: Callable[[bytes], bool]) -> None:
        failed: OSError | None = None
        for slot in [slot for slot, key in self._sealed.items() if not is_live(key)]:
            try:
                self._unseal(slot)
            except OSError as error:  # it stays among those that are to be erased; the others are all the same
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _offset(self, slot: int) -> int:
        return FILE_HEADER_BYTES + slot * self.slot_bytes

    def _unseal(self, slot: int) -> None:
        self._write(memoryview(NO_RECORD), self._offset(slot))
        self._sealed.pop(slot, None)

    def _write(self, view: memoryview, offset: int) -> None:
        while view:
            num_bytes = os.pwrite(self._fd, view, offset)
            view, offset = view[num_bytes:], offset + num_bytes

    def _begin(self) -> None:
        """Takes over what is in the file, if it is ours."""
        size = os.fstat(self._fd).st_size
        if os.pread(self._fd, FILE_HEADER_BYTES, 0) != self._header:
            if size:
                logger.warning("%s holds KV of another model, layout or machine: it is emptied", self.path)
            os.ftruncate(self._fd, 0)
            self._write(memoryview(self._header), 0)
        elif size > self._offset(self.num_slots):
            os.ftruncate(self._fd, self._offset(self.num_slots))

    def _find_place(self, directory: Path) -> tuple[int, Path]:
        """An open, locked file."""
        empty: tuple[int, Path] | None = None
        for number in range(_MAX_PLACES):
            path = directory / str(number) / _FILE_NAME
            if not path.exists() and empty is not None:
                break
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _lock(fd):
                os.close(fd)
            elif os.pread(fd, FILE_HEADER_BYTES, 0) == self._header:
                if empty is not None:
                    os.close(empty[0])
                return fd, path
            elif empty is None:
                empty = fd, path
            else:
                os.close(fd)
        if empty is None:
            raise OSError(errno.EBUSY, f"all {_MAX_PLACES} places below {directory} belong to other processes")
        return empty


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
