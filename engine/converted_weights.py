"""Weights stored in another dtype than the compute dtype: converted once, and mapped from the cache directory.

$PAGEWIRE_CACHE, else ~/.cache/pagewire:  weights/<digest>-bf16.safetensors
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.file_cache import exclusive
from engine.safetensors_file import MappedFiles, TensorEntry, read_header, write_tensors
from engine.weights_digest import Progress, weights_digest

COMPUTE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def dense_bytes(entries: dict[str, TensorEntry], dtype: torch.dtype) -> int:
    return sum(torch.Size(entry.shape).numel() * dtype.itemsize for entry in entries.values())


def converted(
    directory: Path,
    entries: dict[str, TensorEntry],
    dtype: torch.dtype,
    progress: Progress | None,
    cache_dir: Path,
) -> dict[str, TensorEntry]:
    """The tensors of a copy in `dtype`, made by the first process that asks; the others wait and map the same file."""
    digest = weights_digest(directory, cache_dir=cache_dir)
    target = cache_dir / "weights" / f"{digest.hex()}-{COMPUTE_NAMES[dtype].lower()}.safetensors"
    total = dense_bytes(entries, dtype)
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
