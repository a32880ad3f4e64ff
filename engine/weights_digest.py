"""The name of a model's weights: a digest of their content, kept so that later starts need not read them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from engine.cache_dir import default_cache_dir, write_cached
from engine.safetensors_file import MappedFiles, TensorEntry, find_tensors

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


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
    write_cached(remembered, digest.hex().encode())
    return digest


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


def _file_identity(file: Path) -> list[str | int]:
    stat = file.stat()
    return [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
