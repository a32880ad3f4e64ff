"""A model's weights: found, checked, mapped in the compute dtype, and named by a digest of their content.

Nothing is copied on load, so prefill and decode on one host share the pages. Weights stored in another dtype are
converted once, into the cache directory ($PAGEWIRE_CACHE, else ~/.cache/pagewire), and mapped from there.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from engine.expert_tensors import by_expert
from engine.model_config import ModelError
from engine.safetensors_file import MappedFiles, TensorEntry, find_tensors, read_header, write_tensors

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_FLOATS = ("F32", "F16", "BF16")
_COMPUTE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class Weights:
    """Named tensors in the compute dtype. Every tensor must be taken once, with its shape, or `finish` complains.

    Names are looked up below the model's prefix: "layers.0.…" is "model.layers.0.…", or, in a multimodal checkpoint,
    "model.language_model.layers.0.…".
    """

    def __init__(self, directory: Path, entries: dict[str, TensorEntry], dtype: torch.dtype) -> None:
        self._directory = directory
        self._entries = by_expert(entries)
        self._dtype = dtype
        self._files = MappedFiles()
        embeddings = [name for name in entries if name.endswith("embed_tokens.weight")]
        if len(embeddings) != 1:
            raise ModelError(f"{directory}: expected one tensor …embed_tokens.weight, found {embeddings}")
        self._prefix = embeddings[0].removesuffix("embed_tokens.weight")
        self._taken: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in the compute dtype."""
        return _num_bytes(self._entries, self._dtype)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name` of this `shape`. Raises ModelError when it is missing or shaped otherwise.

        "lm_head.weight" is the output matrix of an untied model, wherever it is.
        """
        return self._files.tensor(self.expect(name, shape)).to(self._dtype)

    def expect(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        """Where `take` finds it; counts as taken. Raises ModelError."""
        full_name = self._prefix + name
        if name == "lm_head.weight":
            heads = [each for each in self._entries if each.endswith(name)]
            full_name = heads[0] if len(heads) == 1 else name
        entry = self._entries.get(full_name)
        if entry is None:
            raise ModelError(f"{self._directory}: tensor {full_name} {list(shape)} is missing")
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file}: tensor {full_name} is {list(entry.shape)}; the config asks for {list(shape)}"
            )
        self._taken.add(full_name)
        return entry

    def finish(self) -> None:
        """Raise ModelError when the text model has tensors that nothing took: the result would be wrong."""
        unused = sorted(
            name
            for name in self._entries
            if name.startswith(self._prefix) and name not in self._taken and not name.endswith("rotary_emb.inv_freq")
        )
        unused = [name for name in unused if not name.endswith("lm_head.weight")]  # present in some tied models
        foreign = ("vision", "multi_modal", "audio") if self._prefix != "model.language_model." else ()
        unused = [name for name in unused if not name.removeprefix(self._prefix).startswith(foreign)]
        if unused:
            raise ModelError(
                f"{self._directory}: {len(unused)} tensors are not part of this architecture: {', '.join(unused[:3])}"
            )


def open_weights(
    path: Path | str, dtype: torch.dtype, *, progress: Progress | None = None, cache_dir: Path | None = None
) -> Weights:
    """Map the weights of a model directory in `dtype`. Raises ModelError."""
    directory = Path(path)
    entries = _find_floats(directory)
    if any(entry.dtype != _COMPUTE_NAMES[dtype] for entry in entries.values()):
        entries = _converted(directory, entries, dtype, progress, cache_dir or default_cache_dir())
    elif progress is not None:
        total = _num_bytes(entries, dtype)
        progress(total, total)
    return Weights(directory, entries, dtype)


def map_weights(path: Path | str, dtype: torch.dtype) -> Weights:
    """The same without a converted copy: a tensor stored in another dtype is converted whenever it is taken."""
    directory = Path(path)
    return Weights(directory, _find_floats(directory), dtype)


def _find_floats(directory: Path) -> dict[str, TensorEntry]:
    entries = find_tensors(directory)
    for entry in entries.values():
        if entry.dtype not in _FLOATS:
            raise ModelError(f"{entry.file}: tensor {entry.name} is {entry.dtype}; supported are {', '.join(_FLOATS)}")
    return entries


def _num_bytes(entries: dict[str, TensorEntry], dtype: torch.dtype) -> int:
    return sum(torch.Size(entry.shape).numel() * dtype.itemsize for entry in entries.values())


def weights_digest(path: Path | str, *, progress: Progress | None = None, cache_dir: Path | None = None) -> bytes:
    """SHA-256 over all tensors (name, dtype, shape, content), however they are spread over files. 32 bytes.

    Kept in the cache directory under each file's (path, size, mtime, inode), so later starts don't read the weights.
    """
    directory = Path(path)
    entries = find_tensors(directory)
    identity = [_file_identity(file) for file in sorted({entry.file for entry in entries.values()})]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    remembered = (cache_dir or default_cache_dir()) / "digests" / key
    try:
        digest = bytes.fromhex(remembered.read_text(encoding="ascii"))
        if len(digest) == hashlib.sha256().digest_size:
            return digest
    except (OSError, ValueError):
        pass  # not there yet, or spoiled: computed anew and written again below
    digest = _digest(entries, progress)
    _write_atomically(remembered, digest.hex().encode())
    return digest


def default_cache_dir() -> Path:
    """$PAGEWIRE_CACHE, else ~/.cache/pagewire."""
    return Path(os.environ.get("PAGEWIRE_CACHE") or Path.home() / ".cache" / "pagewire")


def _digest(entries: dict[str, TensorEntry], progress: Progress | None) -> bytes:
    total = sum(entry.num_bytes for entry in entries.values())
    done = 0
    files = MappedFiles()
    whole = hashlib.sha256(b"pagewire-weights-1")
    for name in sorted(entries):
        entry = entries[name]
        content = hashlib.sha256()
        if entry.num_bytes:
            content.update(files.bytes_of(entry))
        label = json.dumps([name, entry.dtype, list(entry.shape)]).encode()
        whole.update(len(label).to_bytes(4, "little") + label + content.digest())
        done += entry.num_bytes
        if progress is not None:
            progress(done, total)
    return whole.digest()


def _converted(
    directory: Path,
    entries: dict[str, TensorEntry],
    dtype: torch.dtype,
    progress: Progress | None,
    cache_dir: Path,
) -> dict[str, TensorEntry]:
    """The tensors of a copy in `dtype`, made by the first process that asks; the others wait and map the same file."""
    digest = weights_digest(directory, cache_dir=cache_dir)
    target = cache_dir / "weights" / f"{digest.hex()}-{_COMPUTE_NAMES[dtype].lower()}.safetensors"
    total = _num_bytes(entries, dtype)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.with_suffix(".lock")):
            if not target.is_file():
                partial = target.with_suffix(".partial")  # one of a killed process is overwritten
                shapes = {name: entry.shape for name, entry in entries.items()}
                write_tensors(partial, shapes, dtype, lambda: _convert(entries, dtype, total, progress))
                partial.rename(target)
    except OSError as error:
        raise ModelError(f"{target}: the converted weights ({total} bytes) can't be written: {error}") from error
    if progress is not None:
        progress(total, total)
    return {entry.name: entry for entry in read_header(target)}


def _convert(
    entries: dict[str, TensorEntry], dtype: torch.dtype, total: int, progress: Progress | None
) -> Iterator[Tensor]:
    files = MappedFiles()
    done = 0
    for entry in entries.values():
        tensor = files.tensor(entry).to(dtype)
        yield tensor
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def _file_identity(file: Path) -> list[str | int]:
    stat = file.stat()
    return [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _write_atomically(file: Path, content: bytes) -> None:
    """A cache that can't be written costs time at the next start, nothing else."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.rename(file)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Hold a file lock, which the kernel drops if this process dies."""
    with lock_file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
