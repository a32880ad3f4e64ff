"""`pagewire run-batch`: answers a file of requests, with an engine in this process or on a running system."""

import gc
import importlib
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.cli import connection as c
from pagewire.cli.failure import CommandFailed
from pagewire.cli.flags import fields_of, with_flags
from pagewire.cli.services import ConfigFile
from pagewire.config import ConfigError, EngineOptions, WorkerConfig, load_config
from pagewire.log import setup_logging

_PANEL = "Connection"


@with_flags(fields_of(EngineOptions))
def run_batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one a line.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers are appended here.")],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="HOST:PORT",
            help="Ask this router instead of loading a model.",
            show_default="none",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    max_concurrent_requests: Annotated[
        int,
        typer.Option(
            "--max-concurrent-requests",
            metavar="N",
            min=1,
            max=4096,
            rich_help_panel=_PANEL,
            help="Requests at a time, with --target.",
        ),
    ] = 64,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="Model directory, with --target: log-probabilities, tools and thoughts need its tokenizer.",
            show_default="none",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
    config: ConfigFile = None,
    **flags: Any,
) -> int:
    """Answer a file of requests in OpenAI's batch format.

    Each line is {"custom_id": …, "method": "POST", "url": "/v1/completions" or "/v1/chat/completions", "body": {…}}.
    Every request gets one line in OUT, an answer or an error. What OUT has already is skipped: after an interruption
    the same command goes on. The exit code is 0 when every line of IN has its line in OUT.

    --model loads a model into this process (a directory, a .gguf file, a hub name or 'demo'), --target uses a running
    system.
    """
    given = [name for name, value in flags.items() if value is not None]
    if target is not None and given:
        raise ConfigError(f"--{given[0].replace('_', '-')}: is an engine's option; the target has its own")
    if not source.exists():
        raise CommandFailed(f"{source}: no such file")
    setup_logging("run-batch", level="warning", log_format="text")
    try:
        batch: Any = importlib.import_module("offline.run_batch")
        if target is None:
            options = _engine_options(flags, config)
            batch.run_batch(source, out, partial(batch.open_local, options), model_name=options.model)
        else:
            security = _of_client(c.load_security(tls_ca, tls_cert, tls_key, auth_token_file))
            open_remote = partial(batch.open_remote, target, tokenizer, max_concurrent_requests, security)
            batch.run_batch(source, out, open_remote)
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}: install 'pagewire[{'worker,router' if target is None else 'router'}]'") from None
    except (ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CommandFailed(" ".join(str(error).split()) or type(error).__name__) from None
    finally:
        # As for workers: the interpreter would look through all of torch once more before it ends.
        gc.freeze()
    return 0


def _engine_options(flags: dict[str, Any], config: Path | None) -> EngineOptions:
    """With the environment and the file, as a decode worker would have them."""
    if flags.get("model") is None and config is None and "PAGEWIRE_MODEL" not in os.environ:
        raise ConfigError("--model or --target is required")
    return load_config(WorkerConfig, {**flags, "role": "decode"}, config, os.environ).engine


def _of_client(security: Any) -> dict[str, Any]:
    return {
        "tls_ca": security.authority,
        "tls_cert": security.certificate,
        "tls_key": security.private_key,
        "token": security.tokens[0] if security.tokens else None,
    }
