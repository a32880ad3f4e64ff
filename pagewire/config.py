"""Configuration of every process: read once from flags, environment and TOML, validated, frozen, passed by value.

Precedence: flags > `PAGEWIRE_*` environment > TOML file > defaults. In the environment and in TOML the options are
flat and bear the flags' names (`--max-num-seqs`, `PAGEWIRE_MAX_NUM_SEQS`, `max_num_seqs = 64`). One TOML file may
serve all roles: top-level keys are for whichever role knows them, the tables `[router]`, `[prefill]` and `[decode]`
override them for that role alone.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pagewire.engine_options import GIB_OPTIONS, EngineOptions
from pagewire.options import ProcessConfig, RouterConfig, WorkerConfig

__all__ = [
    "ConfigError",
    "EngineOptions",
    "ProcessConfig",
    "RouterConfig",
    "WorkerConfig",
    "engine_options",
    "load_config",
    "option_names",
    "options_from_flags",
    "to_toml",
    "with_model",
]

ENV_PREFIX = "PAGEWIRE_"
# What says something of the machine and is no option; `up` passes it on to its children.
MACHINE_VARIABLES = frozenset({"PAGEWIRE_CACHE", "PAGEWIRE_CPU_ISA", "PAGEWIRE_CPU_TURNS"})


class ConfigError(ValueError):
    """A bad option. The message names the field, where it came from, its value and what is allowed."""


ConfigT = TypeVar("ConfigT", bound=ProcessConfig)
OptionsT = TypeVar("OptionsT", bound=BaseModel)

_ENGINE_FIELDS = frozenset(EngineOptions.model_fields)
_ROLES = ("router", "prefill", "decode")
_NOT_OPTIONS = frozenset({"role", "engine"})
_KNOWN_FIELDS = (frozenset(WorkerConfig.model_fields) | frozenset(RouterConfig.model_fields) | _ENGINE_FIELDS) - (
    _NOT_OPTIONS
)


def option_names(cls: type[ProcessConfig]) -> frozenset[str]:
    """Flat option names that `cls` knows, the engine's included."""
    own = frozenset(cls.model_fields)
    return (own | _ENGINE_FIELDS if "engine" in own else own) - _NOT_OPTIONS


def load_config(
    cls: type[ConfigT], flags: Mapping[str, object], toml_path: Path | None, environ: Mapping[str, str]
) -> ConfigT:
    """Reads each source once and returns a validated `cls`. Flags with value None were not given.

    For a worker, `flags` must have "role". Raises ConfigError.
    """
    known = option_names(cls)
    given = {name: value for name, value in flags.items() if value is not None}
    role = str(given.pop("role", "router"))
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"unknown option {unknown[0]!r} for {role}")
    values: dict[str, object] = {}
    sources: dict[str, str] = {}

    def lay_over(layer: Mapping[str, object], source: str) -> None:
        for name, value in layer.items():
            if name in known:
                values[name] = value
                sources[name] = source.format(flag=name.replace("_", "-"), env=name.upper())

    if toml_path is not None:
        for layer in _read_toml(toml_path, role, known):
            lay_over(layer, str(toml_path))
    environment = {name: environ[key] for name in known if (key := ENV_PREFIX + name.upper()) in environ}
    lay_over(environment, f"environment {ENV_PREFIX}{{env}}")
    lay_over(given, "--{flag}")
    return _validate(cls, role, values, sources)


def engine_options(**values: object) -> EngineOptions:
    """Options from arguments alone, as a library takes them. Raises ConfigError."""
    try:
        return EngineOptions.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
    if problem["type"] == "extra_forbidden":
        raise ConfigError(f"{problem['loc'][0]}: no such option; known are {', '.join(sorted(_ENGINE_FIELDS))}")
    raise ConfigError(_describe_problem(problem, "") if problem["loc"] else _without_prefix(problem))


def options_from_flags(cls: type[OptionsT], flags: Mapping[str, object]) -> OptionsT:
    """Options of a command, which has no environment and no file. Raises ConfigError."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return cls.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_describe(error, {name: f"--{name.replace('_', '-')}" for name in given})) from None


def to_toml(config: ProcessConfig, *, show_secrets: bool = False) -> str:
    """All options as TOML that `load_config` reads back; a password in a Redis URL is hidden unless asked for."""
    lines = []
    for name, value in sorted(_flat(config).items()):
        if value is None:
            continue
        if not show_secrets:
            value = _shown(name, value)
        if name in GIB_OPTIONS:
            value = f"{value}B"  # a plain number would be GiB
        lines.append(f"{name} = {json.dumps(value, default=str, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _shown(name: str, value: object) -> object:
    """Without the password, if it is a URL that may have one, however wrong it is."""
    if name not in ("redis_url", "kv_store_url"):
        return value
    return re.sub(r"^([\w+.-]+://)?([^:@/]*:)?.*(?=@)", r"\1\2***", str(value), flags=re.DOTALL)


def _flat(model: BaseModel) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            flat |= _flat(value)
        elif name != "role":
            flat[name] = value
    return flat


def with_model(config: ConfigT, resolve: Callable[[str, str], Path]) -> ConfigT:
    """The same configuration with the model's name resolved to a directory, by (name, dtype); routers' is "auto".

    A name that was no directory ("demo", a hub id) becomes the served name, unless there is one; of a file its stem.
    """
    options: Any = getattr(config, "engine", config)
    path = resolve(options.model, getattr(options, "dtype", "auto"))
    served = options.served_model_name
    if served is None:
        given = Path(options.model).expanduser()
        served = path.resolve().name if given.is_dir() else given.stem if given.is_file() else options.model
    change = {"model": str(path), "served_model_name": served}
    return config.model_copy(update=change if options is config else {"engine": options.model_copy(update=change)})


def _read_toml(path: Path, role: str, known: frozenset[str]) -> tuple[Mapping[str, object], Mapping[str, object]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    shared = {name: value for name, value in document.items() if name not in _ROLES}
    own = document.get(role, {})
    if not isinstance(own, dict):
        raise ConfigError(f"config file {path}: [{role}] must be a table")
    for name in shared:
        if name not in _KNOWN_FIELDS:
            raise ConfigError(f"config file {path}: unknown option {name!r}")
    for name in own:
        if name not in known:
            raise ConfigError(f"config file {path}: unknown option {name!r} in [{role}]")
    return shared, own


def _validate(cls: type[ConfigT], role: str, values: dict[str, object], sources: Mapping[str, str]) -> ConfigT:
    nested: dict[str, Any] = dict(values)
    if "engine" in cls.model_fields:
        nested = {name: value for name, value in values.items() if name not in _ENGINE_FIELDS}
        nested["engine"] = {name: value for name, value in values.items() if name in _ENGINE_FIELDS}
        nested["role"] = role
    try:
        return cls.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(_describe(error, sources)) from None


def _describe(error: ValidationError, sources: Mapping[str, str]) -> str:
    """The first problem as one line; pydantic's own text needs three and repeats itself."""
    problem = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in problem["loc"] if isinstance(part, str) and part != "engine"]
    if not path:
        return _without_prefix(problem)
    name = path[0]
    if problem["type"] == "missing":
        return f"--{name.replace('_', '-')} is required (or {ENV_PREFIX}{name.upper()}, or {name} in the config file)"
    return _describe_problem(problem, f" ({sources.get(name, 'default')})")


def _describe_problem(problem: ErrorDetails, source: str) -> str:
    name = next(part for part in problem["loc"] if isinstance(part, str) and part != "engine")
    return f"{name} = {_shown(name, problem['input'])!r}{source}: {_without_prefix(problem)}"


def _without_prefix(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
