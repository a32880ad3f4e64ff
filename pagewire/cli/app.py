"""The commands, and the one place where an exception becomes a readable line and an exit code."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pagewire import __version__
from pagewire.cli.help_text import help_of

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Module of each command, below pagewire.cli, and the help's panel. A module has a function of the command's name or,
# where there are several below it, a Typer of that name.
_COMMANDS = {
    "up": ("up", "Serve on one machine"),
    "router": ("services", "Serve, one process each"),
    "prefill": ("services", "Serve, one process each"),
    "decode": ("services", "Serve, one process each"),
    "generate": ("generate", "Use"),
    "chat": ("chat", "Use"),
    "run-batch": ("run_batch", "Use"),
    "status": ("status", "Use"),
    "explain-route": ("explain_route", "Use"),
    "health": ("health", "Use"),
    "convert": ("convert", "Models"),
    "bench": ("bench", "Use"),
    "adapter": ("adapter", "Use"),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagewire {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Large language models as gRPC microservices, with prefill and decode as separate services."""


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """With the command alone that the arguments begin with: the flags of all others are half of a process's start.

    With all commands if they begin with none: for the help, and for what a misspelt one may mean.
    """
    app = typer.Typer(
        name="pagewire",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in arguments[:1] if arguments and arguments[0] in _COMMANDS else _COMMANDS:
        module, panel = _COMMANDS[name]
        command = getattr(importlib.import_module(f"pagewire.cli.{module}"), name.replace("-", "_"))
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel, help=help_of(command))(command)
    return app


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; what a user can cause never shows a traceback."""
    command = typer.main.get_command(build_app(arguments))
    try:
        result = command.main(list(arguments), prog_name="pagewire", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`pagewire generate … | head`); don't complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        code, message = _describe(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        return code


def _describe(error: Exception) -> tuple[int, str | None]:
    """Exit code and line for an error that a user can cause; no line for a bug."""
    if isinstance(error, typer.Exit):
        return error.exit_code, ""
    if isinstance(error, typer.Abort):
        return EXIT_INTERRUPTED, "aborted"
    # A usage error; its class is click's or typer's own, depending on typer's version.
    if callable(format_message := getattr(error, "format_message", None)):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "pagewire"
        return EXIT_USAGE, f"{_one_line(format_message())} (see '{path} --help')"
    from pagewire.cli.failure import CommandFailed
    from pagewire.config import ConfigError

    if isinstance(error, ConfigError):
        return EXIT_USAGE, _one_line(str(error))
    if isinstance(error, CommandFailed):
        return EXIT_FAILED, str(error)
    if isinstance(error, OSError):
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return EXIT_FAILED, _one_line(named)
    if "grpc" in sys.modules:
        from pagewire.errors import PagewireError

        if isinstance(error, PagewireError):
            return EXIT_FAILED, f"{error.code.name}: {_one_line(error.message)}"
    return EXIT_FAILED, None


def _one_line(text: str) -> str:
    return " ".join(text.split())
