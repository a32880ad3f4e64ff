"""The directories in the cache that are made of GGUF files: a name for each file, content and purpose. No torch."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from engine.atomic_dir import atomic_directory
from engine.cache_dir import default_cache_dir
from engine.conversion import ConvertError
from engine.gguf_reader import GgufFile

_FORMAT = 4
"""Of what is in them."""


def cached_directory(src: Path, purpose: str, write: Callable[[GgufFile, Path], None]) -> Path:
    """The directory that `write` fills from the file `src`, now or in an earlier call. Raises ConvertError.

    NAME-SOURCE-CONTENT-PURPOSE: of the source's stem, its resolved path, its size and modification time. Those of the
    same source's earlier content are deleted after a new one is written.
    """
    source = f"{src.stem}-{_digest(str(src.resolve()))}-"
    content = _content(src)
    out = default_cache_dir() / "models" / f"{source}{content}-{purpose}"
    if not out.is_dir():
        with atomic_directory(out) as directory:
            if directory is not None:  # else another process was quicker
                write(GgufFile(src), directory)
        if _content(src) == content:  # else `out` is the old one by now
            _delete_others(out.parent, source, f"{source}{content}-")
    return out


def _content(src: Path) -> str:
    try:
        stat = src.stat()
    except OSError as error:
        raise ConvertError(f"{src}: {error.strerror}") from error
    return _digest(f"{stat.st_size}/{stat.st_mtime_ns}/{_FORMAT}")


def _delete_others(parent: Path, source: str, content: str) -> None:
    """Renamed first, so that nobody takes what is left of one for a whole one."""
    for each in sorted(parent.iterdir()):
        with suppress(OSError):  # another user's, or another process deletes it
            if each.name.startswith(source) and not each.name.startswith(content):
                shutil.rmtree(each.rename(each.with_name(f".{each.name}.old")))
            elif each.name.startswith(f".{source}") and each.suffix == ".old":
                shutil.rmtree(each)  # what a killed process left


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
