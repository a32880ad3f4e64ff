"""Named sections of bytes in one file: written once, checked when opened, mapped read-only by every process after that.

    data       each section at a multiple of 4096
    index      JSON: {name: [offset, size, XXH3-64 of the bytes]}
    trailer    64 bytes: index's offset and length (8 each), its SHA-256 (32), MAGIC (16)

The trailer comes last, so what a killed writer leaves, or a truncated file, has none.
"""

import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from torch import Tensor

from engine.file_cache import hold

MAGIC = b"pagewire-sects-1"
ALIGNMENT = 4096
_TRAILER_BYTES = 64
_VERIFY_BYTES = 16 << 20  # hashed at a time


class SectionFileError(Exception):
    """The file is not a complete, unharmed section file."""


class SectionWriter:
    """Writes a file section by section. Raises OSError, in particular when the disk is full."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._index: dict[str, tuple[int, int, str]] = {}
        self._end = 0

    def __enter__(self) -> "SectionWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @contextmanager
    def section(self, name: str, size: int) -> Iterator[Tensor]:
        """A new section of zeros to fill in place, uint8 [size]."""
        if size == 0 or name in self._index:
            raise ValueError(f"section {name} of {size} bytes is empty or there already")
        # Takes the room now: writing to a mapped page without any would kill the process.
        os.posix_fallocate(self._descriptor, self._end, size)
        mapped = mmap.mmap(self._descriptor, size, offset=self._end)
        yield torch.frombuffer(mapped, dtype=torch.uint8)
        self._index[name] = (self._end, size, _checksum(memoryview(mapped)))
        self._end += -(-size // ALIGNMENT) * ALIGNMENT

    def finish(self) -> None:
        """Write index and trailer."""
        index = json.dumps(self._index).encode()
        digest = hashlib.sha256(index).digest()
        trailer = self._end.to_bytes(8, "little") + len(index).to_bytes(8, "little") + digest + MAGIC
        content = memoryview(index + trailer)
        while content:
            written = os.pwrite(self._descriptor, content, self._end)
            self._end, content = self._end + written, content[written:]


class SectionFile:
    """A section file, mapped, and held (file_cache.py) while any of its tensors is.

    Raises SectionFileError when it is not whole, OSError when it can't be read.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            hold(stream.fileno())
            size = os.fstat(stream.fileno()).st_size
            if size < _TRAILER_BYTES:
                raise SectionFileError(f"{file}: {size} bytes are no section file")
            self._bytes = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        self._file = file
        self._index = self._read_index(size)
        for name, (offset, length, checksum) in self._index.items():
            if _checksum(self._bytes[offset : offset + length]) != checksum:
                raise SectionFileError(f"{file}: the content of section {name} is damaged")

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def tensor(self, name: str, size: int) -> Tensor:
        """The section, uint8 [size], not to be written to. Raises SectionFileError if there is none of that size."""
        offset, length, _ = self._index.get(name, (0, -1, ""))
        if length != size:
            raise SectionFileError(f"{self._file}: section {name} of {size} bytes is not there")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(self._bytes[offset : offset + length], dtype=torch.uint8)

    def _read_index(self, size: int) -> dict[str, tuple[int, int, str]]:
        trailer = self._bytes[size - _TRAILER_BYTES :]
        begin, length = (int.from_bytes(trailer[i : i + 8], "little") for i in (0, 8))
        index = bytes(self._bytes[begin : begin + length])
        if bytes(trailer[48:]) != MAGIC or begin + length + _TRAILER_BYTES != size:
            raise SectionFileError(f"{self._file}: is no section file, or cut short ({size} bytes)")
        if hashlib.sha256(index).digest() != bytes(trailer[16:48]):
            raise SectionFileError(f"{self._file}: its index is damaged")
        return {name: (offset, count, checksum) for name, (offset, count, checksum) in json.loads(index).items()}


def _checksum(content: memoryview) -> str:
    digest = xxhash.xxh3_64()
    for begin in range(0, len(content), _VERIFY_BYTES):
        digest.update(content[begin : begin + _VERIFY_BYTES])
    return digest.hexdigest()
