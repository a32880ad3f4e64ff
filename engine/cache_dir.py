"""Where what is made once for a machine is kept."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$PAGEWIRE_CACHE, else ~/.cache/pagewire."""
    return Path(os.environ.get("PAGEWIRE_CACHE") or Path.home() / ".cache" / "pagewire")
