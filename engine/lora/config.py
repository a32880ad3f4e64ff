"""PEFT's adapter_config.json: what is read of it, and what changes the result in ways that are not served."""

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.hf_config import read_json
from engine.lora.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
_MAX_CONFIG_BYTES, _MAX_ENTRIES = 4 << 20, 4096
_REFUSED = (
    "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_bdlora", "arrow_config",
)  # fmt: skip
"""Fields that change what the adapter computes; anything but their empty value is refused."""
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq")
"""Values of init_lora_weights that belong to a changed base model."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Ranks and scales by module; `targets` are the suffixes of module names that the adapter says it changes."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    targets: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """The rank that module's matrices must have."""
        return int(_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        rank = self.rank_of(module)
        return _match(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def read_lora_config(directory: Path) -> LoraConfig:
    """Raises AdapterError."""
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise AdapterError(f"{file}: no such file; an adapter directory needs {CONFIG_FILE} and its safetensors")
    if (size := file.stat().st_size) > _MAX_CONFIG_BYTES:
        raise AdapterError(f"{file}: has {size} bytes, must be at most {_MAX_CONFIG_BYTES}")
    try:
        return _describe(read_json(file))
    except (ValueError, RecursionError) as error:  # a ModelError names the file already
        raise AdapterError(str(error) if isinstance(error, ModelError) else f"{file}: {error}") from error


def _describe(values: Mapping[str, Any]) -> LoraConfig:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type is {kind!r}; only 'LORA' is served")
    if (bias := values.get("bias", "none")) != "none":
        raise ValueError(f"bias is {bias!r}; only 'none' is served")
    for name in _REFUSED:
        if values.get(name):
            raise ValueError(f"{name} is {values[name]!r}; adapters with it are not served")
    init = values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING):
        raise ValueError(f"init_lora_weights is {init!r}: it belongs to a changed base model; convert it to plain LoRA")
    rank = _rank("r", values.get("r"))
    targets = values.get("target_modules")
    # A text is a regular expression over module names (or "all-linear"): then the tensors say what is changed.
    listed = tuple(map(str, targets)) if isinstance(targets, list) else ()
    _check_length("target_modules", listed)
    return LoraConfig(
        rank=rank,
        alpha=_number("lora_alpha", values.get("lora_alpha", 8)),
        rank_pattern={name: _rank(f"rank_pattern.{name}", r) for name, r in _pattern(values, "rank_pattern").items()},
        alpha_pattern={
            name: _number(f"alpha_pattern.{name}", a) for name, a in _pattern(values, "alpha_pattern").items()
        },
        use_rslora=bool(values.get("use_rslora", False)),
        targets=listed,
    )


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    return value


def _number(name: str, value: object) -> float:
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {str(value)[:40]!r}; it must be a finite number")
    return number


def _pattern(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Module names or their ends; PEFT takes regular expressions too, which are not for a server to run."""
    pattern = values.get(name) or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{name} is a {type(pattern).__name__}; it must be an object")
    _check_length(name, pattern)
    for key in pattern:
        if not key.replace(".", "").replace("_", "").isalnum():
            raise ValueError(f"{name} has {key!r}; only module names and their ends are served, no expressions")
    return pattern


def _check_length(name: str, entries: Sized) -> None:
    """Each is compared with each module's name."""
    if len(entries) > _MAX_ENTRIES:
        raise ValueError(f"{name} has {len(entries)} entries, must have at most {_MAX_ENTRIES}")


def _match(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The first entry that is the module's name, or its end; a checkpoint's prefix may come before the name."""
    for key, value in pattern.items():
        if f".{module}".endswith(f".{key}") or f".{key}".endswith(f".{module}"):
            return value
    return default
