"""Where what is made once for a machine is kept."""

import os
from contextlib import suppress
from pathlib import Path


def default_cache_dir() -> Path:
    """$PAGEWIRE_CACHE, else ~/.cache/pagewire."""
    return Path(os.environ.get("PAGEWIRE_CACHE") or Path.home() / ".cache" / "pagewire")


def write_cached(file: Path, content: bytes) -> None:
    """Whole or not at all. A cache that can't be written costs time at the next start, nothing else."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.rename(file)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
