"""From what a user calls a model to a directory: a path, a GGUF file, `demo`, or a name on the Hugging Face hub."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from pagewire.cli.failure import CommandFailed
from pagewire.cli.progress import stage_progress
from pagewire.config import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve_model(name: str, dtype: str = "auto", *, weights: bool = True) -> Path:
    """The model's directory, made or downloaded if need be, with progress bars on stderr when that is a terminal.

    `dtype`: what a GGUF file's weights are expanded to where they can't stay packed; without `weights` there is only
    what a router reads of it.

    Raises ConfigError if there is no such model, CommandFailed if it cannot be had.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model = {name!r}: the directory has no config.json")
        return path
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, dtype if weights else None)
    if path.exists():
        raise ConfigError(f"model = {name!r}: is not a directory")
    if name == "demo":
        return _prepare_demo()
    if name.count("/") == 1 and _HUB_ID.fullmatch(name):
        return _download(name)
    raise ConfigError(f"model = {name!r}: no such directory, and neither 'demo' nor a hub name (owner/name)")


def _from_gguf(path: Path, dtype: str | None) -> Path:
    """With weights if there is a `dtype`."""
    module: Any = _import("engine.gguf_description" if dtype is None else "engine.gguf", "worker")
    with stage_progress(path.name) as progress:
        try:
            if dtype is None:
                return Path(module.described_directory(path, progress=progress))
            return Path(module.packed_directory(path, dtype=dtype, progress=progress))
        except module.ConvertError as error:
            raise CommandFailed(f"model = {str(path)!r}: {' '.join(str(error).split())}") from None


def _prepare_demo() -> Path:
    module: Any = _import("engine.demo_model", "demo")
    with stage_progress("demo model") as progress:
        try:
            return Path(module.prepare_demo_model(progress=progress))
        except ModuleNotFoundError as error:  # what only making it needs is imported when it is made
            raise CommandFailed(f"{error}: install 'pagewire[demo]'") from None
        except module.ConvertError as error:
            raise CommandFailed(" ".join(str(error).split())) from None


def _download(name: str) -> Path:
    hub: Any = _import("huggingface_hub", "worker")
    if not sys.stderr.isatty():
        _import("huggingface_hub.utils", "worker").disable_progress_bars()
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:
        # The hub client raises errors of half a dozen libraries; whichever it is, this model cannot be had.
        reason = " ".join(str(error).split())[:200]
        raise CommandFailed(f"model = {name!r}: not a directory, and the download failed: {reason}") from None


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}: install 'pagewire[{extra}]'") from None
