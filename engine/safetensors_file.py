"""safetensors files: a model's are mapped, so that processes share the pages; what may change is read once."""

import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.hf_config import read_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes begin : end of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def find_tensors(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of a model directory: model.safetensors, the shards its index names, or else every *.safetensors.

    Raises ModelError naming the file at fault. Pickled weights are refused.
    """
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file() and not single.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: has no weight_map")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise ModelError(f"{index}: weight_map has {file_name!r} for {name}; it must be a file name")
        files = [directory / file_name for file_name in sorted(set(weight_map.values()))]
    elif single.is_file():
        weight_map = None
        files = [single]
    else:
        weight_map = None
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        also = f" ({', '.join(pickled)} is pickled, which is never loaded)" if pickled else ""
        raise ModelError(f"{directory}: no *.safetensors file{also}")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(file):
            if entry.name in entries:
                raise ModelError(f"{file}: tensor {entry.name} is also in {entries[entry.name].file}")
            entries[entry.name] = entry
    for name in weight_map or ():
        if name not in entries:
            raise ModelError(f"{index}: tensor {name} is not in {weight_map[name] if weight_map else ''}")
    return entries


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file, in file order; every offset is checked against shape, dtype and the file's size."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{file}: not a safetensors file, or cut short ({size} bytes, header of {length})")
            header = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from error
    return _parse_header(file, header, size)


def _parse_header(file: Path, text: bytes | memoryview, size: int) -> list[TensorEntry]:
    """The tensors of a file of `size` bytes whose header is `text`. Raises ModelError."""
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: the safetensors header is a {type(header).__name__}, not a JSON object")
    start = 8 + len(text)
    entries = []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = value["dtype"], tuple(_size(dimension) for dimension in value["shape"])
            begin, end = (start + _size(offset) for offset in value["data_offsets"])
            num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{file}: tensor {name} has a header that can't be used: {str(value)[:200]}") from error
        if not start <= begin <= end <= size or end - begin != num_bytes:
            raise ModelError(f"{file}: tensor {name} {dtype}{list(shape)} is cut short or lies outside the file")
        entries.append(TensorEntry(name, dtype, shape, file, begin, end))
    return sorted(entries, key=lambda entry: entry.begin)


def _size(value: object) -> int:
    """Raises ValueError for what is no number of elements or bytes."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a size")
    return value


class MappedFiles:
    """Tensors as views of mapped files. Pages are shared with every process that maps the file, until one writes."""

    def __init__(self) -> None:
        self._files: dict[Path, memoryview] = {}

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        if entry.file not in self._files:
            with entry.file.open("rb") as stream:
                # Copy-on-write: nothing is ever written, but torch warns about views of read-only memory.
                self._files[entry.file] = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
        return self._files[entry.file][entry.begin : entry.end]

    def tensor(self, entry: TensorEntry) -> Tensor:
        return _view(entry, self.bytes_of(entry)) if entry.num_bytes else _view(entry, memoryview(b""))


class FileInMemory:
    """One file's content, read once: whatever is done to the file afterwards, header, bytes and tensors agree."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        """Raises ModelError, also for a file of more than `max_bytes` or one that shrinks meanwhile."""
        self.file = file
        try:
            with file.open("rb", buffering=0) as stream:
                status = os.fstat(stream.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ModelError(f"{file}: is not a regular file")
                size = status.st_size
                if size > max_bytes:
                    raise ModelError(f"{file}: has {size} bytes, must be at most {max_bytes}")
                self._bytes = memoryview(bytearray(size))
                num_read = 0
                while num_read < size and (count := stream.readinto(self._bytes[num_read:])):
                    num_read += count
        except OSError as error:
            raise ModelError(f"{file}: {error.strerror}") from error
        if num_read < size:
            raise ModelError(f"{file}: was cut short while it was read, to {num_read} of {size} bytes")

    def entries(self) -> list[TensorEntry]:
        """As `read_header`'s."""
        size = len(self._bytes)
        length = int.from_bytes(self._bytes[:8], "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{self.file}: not a safetensors file, or cut short ({size} bytes, header of {length})")
        return _parse_header(self.file, self._bytes[8 : 8 + length], size)

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        """What is stored."""
        return self._bytes[entry.begin : entry.end]

    def tensor(self, entry: TensorEntry) -> Tensor:
        """A view, which keeps the whole content alive."""
        return _view(entry, self.bytes_of(entry))


def _view(entry: TensorEntry, data: memoryview) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    return torch.frombuffer(data, dtype=dtype).view(entry.shape) if data else torch.empty(entry.shape, dtype=dtype)


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Callable[[], Iterator[Tensor]]
) -> None:
    """Write tensors of one dtype, one at a time, in the order of `shapes`; data starts at a multiple of 64 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors():
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
