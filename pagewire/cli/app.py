"""The commands, and the one place where an exception becomes a readable line and an exit code."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from pagewire import __version__
from pagewire.cli import adapter
from pagewire.cli.bench import ManyValues, serve
from pagewire.cli.chat import chat
from pagewire.cli.convert import convert
from pagewire.cli.explain_route import explain_route
from pagewire.cli.generate import generate
from pagewire.cli.health import health
from pagewire.cli.run_batch import run_batch
from pagewire.cli.services import decode, prefill, router
from pagewire.cli.status import status
from pagewire.cli.up import up

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="pagewire",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagewire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Large language models as gRPC microservices, with prefill and decode as separate services."""


def _help(command: Callable[..., int]) -> str:
    # typer keeps a docstring's line breaks; the terminal's width should decide.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs)


def _add(panel: str, *commands: Callable[..., int]) -> None:
    for command in commands:
        app.command(rich_help_panel=panel, help=_help(command))(command)


_add("Serve on one machine", up)
_add("Serve, one process each", router, prefill, decode)
_add("Use", generate, chat, run_batch, status, explain_route, health)
_add("Models", convert)

bench = typer.Typer(no_args_is_help=True, help="Benchmarks, in vLLM's names.")
bench.command(help=_help(serve), cls=ManyValues)(serve)
app.add_typer(bench, name="bench", rich_help_panel="Use")
for name, command in (("load", adapter.load), ("unload", adapter.unload), ("list", adapter.list_)):
    adapter.adapter.command(name, help=_help(command))(command)
app.add_typer(adapter.adapter, name="adapter", rich_help_panel="Use")


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; what a user can cause never shows a traceback."""
    command = typer.main.get_command(app)
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
