"""The directories in the cache that are made of GGUF files: a name for each file, content and purpose. No torch."""

from collections.abc import Callable
from pathlib import Path

import xxhash

from engine.atomic_dir import atomic_directory
from engine.cache_dir import default_cache_dir
from engine.gguf_reader import ConvertError, GgufFile

_FORMAT = 2
"""Of what is in them."""


def cached_directory(src: Path, purpose: str, write: Callable[[GgufFile, Path], None]) -> Path:
    """The directory that `write` fills from the file `src`, now or in an earlier call. Raises ConvertError.

    NAME-SOURCE-CONTENT-PURPOSE: of the source's stem, its resolved path, its size and modification time.
    """
    try:
        stat = src.stat()
    except OSError as error:
        raise ConvertError(f"{src}: {error.strerror}") from error
    source = f"{src.stem}-{_digest(str(src.resolve()))}-"
    content = f"{source}{_digest(f'{stat.st_size}/{stat.st_mtime_ns}/{_FORMAT}')}-"
    out = default_cache_dir() / "models" / f"{content}{purpose}"
    if not out.is_dir():
        with atomic_directory(out) as directory:
            if directory is not None:  # else another process was quicker
                write(GgufFile(src), directory)
    return out


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
