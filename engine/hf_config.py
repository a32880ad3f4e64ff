"""A model directory's configuration as transformers reads it, and its fields, checked one by one.

What is wrong with a file is a ModelError that names it; what is wrong with a field a ValueError that names that.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelError
from engine.quantized.config import parse_quantization

MAX_HEAD_DIM = 1024
_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_hf_config(directory: Path) -> Any:
    """transformers' object. Raises ModelError."""
    config_file = directory / "config.json"
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    if not config_file.is_file():
        raise ModelError(f"{config_file}: no such file; a model directory needs config.json and *.safetensors")
    raw = read_json(config_file)
    if raw.get("quantization_config") is not None:
        try:  # here: AutoConfig may import what it names, or fail otherwise
            parse_quantization(raw["quantization_config"])
        except ValueError as error:
            raise ModelError(f"{config_file}: {error}") from error
    from transformers import AutoConfig  # here: it costs a second, and tests of this file's errors need none of it

    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, none of which names the file
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]
        raise ModelError(f"{config_file}: {reason}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def compute_dtype(wanted: str, text: Any) -> torch.dtype:
    """ "auto" is the stored one, or float32 where nothing computes in that. Raises ModelError."""
    if wanted == "auto":
        stored = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
        return _DTYPES.get(stored, torch.float32)
    if wanted not in _DTYPES:
        raise ModelError(f"dtype {wanted!r} is not supported; supported are auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]


def positive(text: Any, name: str) -> int:
    """The field's value. Raises ValueError unless it is a positive integer."""
    value = getattr(text, name, None)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    return value


def check_head_dim(head_dim: int) -> None:
    """Raises ValueError above what the native kernels keep of a head on their stack."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; it must be at most {MAX_HEAD_DIM}")


def first_id(value: object) -> int | None:
    """A token id, or the first of a list of them."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) else None


def read_eos_token_ids(directory: Path, hf: Any, text: Any) -> tuple[int, ...]:
    """All ids that end a sequence: generation_config.json's, else the config's; in the order given, each once."""
    generation_file = directory / "generation_config.json"
    found: object = None
    if generation_file.is_file():
        found = read_json(generation_file).get("eos_token_id")
    for source in (hf, text):
        if found is None:
            found = getattr(source, "eos_token_id", None)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"eos_token_id is {found!r}; it must be an integer or a list of them")
    return tuple(dict.fromkeys(ids))
