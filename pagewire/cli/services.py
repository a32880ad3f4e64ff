"""`pagewire router | prefill | decode`: one service, configured from flags, environment and TOML."""

import gc
import importlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.cli.failure import CommandFailed
from pagewire.cli.flags import fields_of, with_flags
from pagewire.cli.model import resolve_model
from pagewire.config import (
    ConfigT,
    EngineOptions,
    RouterConfig,
    WorkerConfig,
    load_config,
    to_toml,
    with_model,
)
from pagewire.log import setup_logging
from pagewire.supervisor import die_with_parent

logger = logging.getLogger(__name__)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file; flags and PAGEWIRE_* variables win over it.",
        rich_help_panel="Configuration",
        show_default=False,
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Print the resulting configuration as TOML and exit.", rich_help_panel="Configuration"
    ),
]

_WORKER_FIELDS = fields_of(EngineOptions, WorkerConfig)


@with_flags(fields_of(RouterConfig))
def router(config: ConfigFile = None, print_config: PrintConfig = False, **flags: Any) -> int:
    """Serve the public API: tokenize, choose workers, stream text."""
    return _serve(RouterConfig, "router", "router.main", config, print_config, flags)


@with_flags(_WORKER_FIELDS)
def prefill(config: ConfigFile = None, print_config: PrintConfig = False, **flags: Any) -> int:
    """Serve prefill: compute prompts' KV cache and first tokens."""
    return _serve(WorkerConfig, "prefill", "prefill_svc.main", config, print_config, flags)


@with_flags(_WORKER_FIELDS)
def decode(config: ConfigFile = None, print_config: PrintConfig = False, **flags: Any) -> int:
    """Serve decode: pull KV cache from prefill workers and generate tokens."""
    return _serve(WorkerConfig, "decode", "decode_svc.main", config, print_config, flags)


def _serve(
    cls: type[ConfigT], role: str, module: str, file: Path | None, print_config: bool, flags: dict[str, Any]
) -> int:
    die_with_parent()
    config = load_config(cls, {**flags, "role": role}, file, os.environ)
    if print_config:
        typer.echo(to_toml(config), nl=False)
        return 0
    setup_logging(role, level=config.log_level, log_format=config.log_format)
    config = with_model(config, partial(resolve_model, weights=role != "router"))
    service = _import(module, extra="router" if role == "router" else "worker")
    try:
        return int(service.run(config))
    except (ValueError, RuntimeError) as error:
        # A model that cannot be loaded, limits that do not fit: the engine's own words say what.
        logger.debug("start failed", exc_info=True)
        raise CommandFailed(" ".join(str(error).split()) or type(error).__name__) from None
    finally:
        # The interpreter would look through all of torch once more before it ends: 0.5 s of CPU.
        gc.freeze()


def _import(module: str, *, extra: str) -> Any:
    """Imports a service without the collector, which finds nothing in 0.2 s of a worker's 2.2 s of imports.

    What was imported stays; frozen, no later collection has to look through it while requests wait.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}: install 'pagewire[{extra}]'") from None
    finally:
        gc.freeze()
        gc.enable()
