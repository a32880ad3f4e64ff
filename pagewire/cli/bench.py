"""`pagewire bench serve`: load on a running system, with the options of `vllm bench serve`."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pagewire.benchmark.options import ServeBenchOptions
from pagewire.cli import connection as c
from pagewire.cli.failure import CommandFailed
from pagewire.cli.flags import fields_of, with_flags
from pagewire.cli.help_text import help_of
from pagewire.config import ConfigError, options_from_flags

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_TAKE_MANY = frozenset({"--goodput", "--metadata"})


def repeat_flags(arguments: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """`--goodput a b` as `--goodput a --goodput b`: argparse's way to give many values, which click does not know."""
    flag, has_value = "", False
    for argument in arguments:
        if argument.startswith("--"):
            flag, has_value = argument if argument in flags else "", False
        elif flag:
            if has_value:
                yield flag
            has_value = True
        yield argument


class ManyValues(TyperCommand):
    """A command whose --goodput and --metadata take several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(repeat_flags(args, _TAKE_MANY)))


@with_flags(fields_of(ServeBenchOptions), can_switch_off=False)
def serve(
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            metavar="NAME:MS …",
            help="Objectives of ttft, tpot and e2el, in milliseconds; counts requests that meet all.",
            rich_help_panel="Result",
            show_default=False,
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata",
            metavar="KEY=VALUE …",
            help="Goes into the result.",
            rich_help_panel="Result",
            show_default=False,
        ),
    ] = None,
    target: c.Target = c.DEFAULT_TARGET,
    model: c.Model = "",
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
    **flags: Any,
) -> int:
    """Measure a running system under load: latencies, throughput, goodput.

    Options and the result's names are those of `vllm bench serve`. Failures are counted by code. Ctrl-C ends the run
    and reports what was measured. The exit code is 0 if every request succeeded.
    """
    from pagewire.benchmark.goodput import parse_goodput

    options = options_from_flags(ServeBenchOptions, flags)
    objectives, labels = parse_goodput(goodput or ()), _labels(metadata or ())
    if options.dataset_path is not None and not options.dataset_path.is_file():
        raise CommandFailed(f"{options.dataset_path}: no such file")
    security = c.load_security(tls_ca, tls_cert, tls_key, auth_token_file)
    _require(options)
    from pagewire.benchmark.backend import SendError
    from pagewire.benchmark.serve import Target, serve_bench

    try:
        run = asyncio.run(serve_bench(options, Target(target, model, security), objectives, labels))
    except SendError as error:
        raise CommandFailed(f"{error.code}: {' '.join(error.message.split())}") from None
    if run.num_unfinished:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if run.errors_by_code else 0


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"metadata = {pair!r}: must be KEY=VALUE")
        labels[key.strip()] = value.strip()
    return labels


def _require(options: ServeBenchOptions) -> None:
    """What is only there with an extra is asked for before the run, not after it."""
    if options.report:
        from pagewire.benchmark.report import ReportError, require_matplotlib

        try:
            require_matplotlib()
        except ReportError as error:
            raise CommandFailed(str(error)) from None
    try:
        if options.is_http:
            import httpx2  # noqa: F401
        if options.tokenizer is not None:
            import tokenizers  # noqa: F401
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}: install 'pagewire[bench]'") from None


bench = typer.Typer(no_args_is_help=True, help="Benchmarks, in vLLM's names.")
bench.command(help=help_of(serve), cls=ManyValues)(serve)
