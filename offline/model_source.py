"""From what a user calls a model to a directory that loads: what the CLI takes, and GGUF files, converted once."""

from pathlib import Path

import xxhash

from pagewire.cli.failure import CommandFailed
from pagewire.cli.model import resolve_model
from pagewire.cli.progress import stage_progress
from pagewire.config import EngineOptions


class ModelUnavailable(ValueError):
    """The model cannot be had: no such file, a failed download, a file that cannot be converted."""


def with_directory(options: EngineOptions) -> EngineOptions:
    """The same options with the model as a directory; a name that was none becomes the served name.

    Raises ConfigError if there is no such model, ModelUnavailable if it cannot be had.
    """
    name = options.model
    path = Path(name).expanduser()
    try:
        is_file = path.suffix == ".gguf" and path.is_file()
        directory = _converted(path, options.dtype) if is_file else resolve_model(name)
    except CommandFailed as error:
        raise ModelUnavailable(str(error)) from None
    served = options.served_model_name
    if served is None:
        served = directory.resolve().name if path.is_dir() else path.stem if is_file else name
    return options.model_copy(update={"model": str(directory), "served_model_name": served})


def _converted(path: Path, dtype: str) -> Path:
    """The directory in the cache that the file was converted to, now or by an earlier call."""
    from engine.atomic_dir import atomic_directory
    from engine.gguf import ConvertError, write_model
    from engine.gguf_reader import GgufFile
    from engine.weights import default_cache_dir

    dtype = "bfloat16" if dtype == "auto" else dtype
    stat = path.stat()
    key = xxhash.xxh3_128_hexdigest(f"{path.resolve()}/{stat.st_size}/{stat.st_mtime_ns}/{dtype}".encode())
    out = default_cache_dir() / "models" / f"{path.stem}-{key[:16]}"
    if out.is_dir():
        return out
    try:
        with stage_progress(path.name) as progress, atomic_directory(out) as partial:
            if partial is not None:  # else another process was quicker
                write_model(GgufFile(path), partial, dtype=dtype, progress=progress)
    except ConvertError as error:
        raise ModelUnavailable(f"model = {str(path)!r}: {' '.join(str(error).split())}") from None
    return out
