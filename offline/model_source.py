"""From what a user calls a model to a directory that loads: what the CLI takes, and GGUF files, converted once."""

from pathlib import Path

from pagewire.cli.failure import CommandFailed
from pagewire.cli.model import resolve_model
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
        directory = resolve_model(name, options.dtype)
    except CommandFailed as error:
        raise ModelUnavailable(str(error)) from None
    served = options.served_model_name
    if served is None:
        served = directory.resolve().name if path.is_dir() else path.stem if is_file else name
    return options.model_copy(update={"model": str(directory), "served_model_name": served})
