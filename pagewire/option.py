"""How an option is written: its field with limits and the help of its flag, and the types that several share."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(value: object) -> object:
    """`"512MiB"`, `"2G"` (powers of 1024), `"2GB"` (of 1000) or a plain number; anything else is left to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _BYTE_UNITS:
        return value
    return int(float(match[1]) * _BYTE_UNITS[match[2].lower()])


def parse_gib(value: object) -> object:
    """A plain number is GiB, as in vLLM; with a unit it is what `parse_bytes` says."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(?:\.\d+)?\s*", value):
        value = float(value)
    return int(value * 1024**3) if isinstance(value, int | float) and math.isfinite(value) else parse_bytes(value)


def _split_commas(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _check_endpoint(value: object) -> object:
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("must be HOST:PORT with a port in 1 … 65535")
    return value


def _check_redis_url(value: object) -> object:
    schemes = ("redis", "rediss", "valkey", "valkeys", "unix", "redis+sentinel", "redis+cluster")
    if isinstance(value, str) and urlsplit(value).scheme not in schemes:
        raise ValueError(f"must be a URL with one of the schemes {', '.join(f'{scheme}://' for scheme in schemes)}")
    return value


ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
GibCount = Annotated[int, BeforeValidator(parse_gib)]
"""Bytes in the end; what is given is GiB unless it has a unit."""
Endpoints = Annotated[tuple[Annotated[str, BeforeValidator(_check_endpoint)], ...], BeforeValidator(_split_commas)]
RedisUrl = Annotated[str, BeforeValidator(_check_redis_url)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


def option(
    default: Any,
    help_text: str,
    *,
    panel: str,
    metavar: str = "",
    shown_default: str = "",
    short: str = "",
    **limits: Any,
) -> Any:
    """A field that is also a flag: `panel` groups it in `--help`, `shown_default` replaces a default of None there.

    `short`: another name of the flag.
    """
    extra: Mapping[str, str] = {"panel": panel, "metavar": metavar, "shown_default": shown_default, "short": short}
    return Field(default, description=help_text, json_schema_extra=dict(extra), **limits)


class Frozen(BaseModel):
    """Read once, passed by value; an unknown name is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
