"""What transformers makes of a config.json, kept in the cache directory: later starts need not import transformers.

Importing it takes 0.8 s of CPU, more than all else that a worker does between its imports and its ready line; it is
needed for a model family's default values and for what old names in a file mean today. Kept under the file's content
and transformers' version.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.cache_dir import default_cache_dir, write_cached

_FORMAT = 1
_ATTRIBUTES, _OTHER_NAMES = "attributes", "other_names"
# Where the file was, which is not its content.
_LEFT_OUT = frozenset({"_name_or_path", "name_or_path"})


class KeptConfig:
    """Attributes as transformers' config object had them, its configs within it too. A dtype is its name."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._other_names = dict(stored[_OTHER_NAMES])
        for name, value in stored[_ATTRIBUTES].items():
            is_config = isinstance(value, dict) and value.keys() == {_ATTRIBUTES, _OTHER_NAMES}
            setattr(self, name, KeptConfig(value) if is_config else value)

    def __getattr__(self, name: str) -> Any:
        other = self.__dict__.get("_other_names", {}).get(name)
        if other is None:
            raise AttributeError(f"the config has no {name}")
        return getattr(self, other)


def kept_config(file: Path, read: Callable[[], Any], *, cache_dir: Path | None = None) -> Any:
    """The config in `file` from the cache; else `read()`, transformers' own object, and what was read is kept.

    What can't be kept is returned as it is. Raises what `read` raises.
    """
    target = _target(file, cache_dir or default_cache_dir())
    if target is None:
        return read()
    try:
        return KeptConfig(json.loads(target.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # not there yet, or spoiled: made anew and written again below
    config = read()
    try:
        content = json.dumps(_stored(config))
    except Exception:  # a property of a family that isn't served may raise anything
        return config
    if _target(file, cache_dir or default_cache_dir()) != target:
        return config  # the file was replaced meanwhile: what was read may be of the other content
    write_cached(target, content.encode())
    return KeptConfig(json.loads(content))


def _target(file: Path, cache_dir: Path) -> Path | None:
    """None for a file that can't be read, or that doesn't say all by itself."""
    try:
        content = file.read_bytes()
        label = json.dumps([_FORMAT, version("transformers")]).encode()
    except (OSError, PackageNotFoundError):
        return None
    if b'"configuration_files"' in content or b'"auto_map"' in content:
        return None
    return cache_dir / "configs" / f"{hashlib.sha256(label + content).hexdigest()}.json"


def _stored(config: Any) -> dict[str, Any]:
    """As JSON types; raises TypeError for anything else."""
    cls = type(config)
    computed = {
        name
        for base in cls.__mro__
        if base.__module__.startswith("transformers.models.")
        for name, member in vars(base).items()
        if isinstance(member, property)
    }
    names = (vars(config).keys() | config.to_dict().keys() | computed) - _LEFT_OUT
    return {
        _ATTRIBUTES: {name: _plain(getattr(config, name)) for name in sorted(names)},
        _OTHER_NAMES: dict(cls.attribute_map),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    return _stored(value) if hasattr(value, "model_type") and hasattr(value, "to_dict") else value
