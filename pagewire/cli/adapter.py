"""`pagewire adapter load|unload|list`: LoRA adapters of a running system, on all its workers or on one."""

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pagewire.cli import connection as c
from pagewire.cli.help_text import help_of

if TYPE_CHECKING:
    from pagewire.security import Security

T = TypeVar("T")

_LOAD_SECONDS = 300.0
_ACTION_SECONDS = 30.0

adapter = typer.Typer(no_args_is_help=True, help="LoRA adapters of a running system.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="What requests ask for.")]


def load(
    name: Name,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Its directory, below the workers' --lora-root.")],
    check: Annotated[bool, typer.Option("--check", help="Only say whether all workers could serve it.")] = False,
    target: c.Target = c.DEFAULT_TARGET,
    timeout: c.Timeout = _LOAD_SECONDS,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
) -> int:
    """Load an adapter on every worker, or replace the one of that name.

    If a worker can't, nothing has changed anywhere. Workers that start later get it too.
    """
    from pagewire.v1 import admin_pb2

    request = admin_pb2.LoadAdapterRequest(name=name, path=path, check_only=check)
    security = c.load_security(tls_ca, tls_cert, tls_key, auth_token_file)
    found = _call(target, security, lambda stub, more: stub.LoadAdapter(request, **more), timeout).adapter
    done = "could be loaded" if check else "loaded"
    print(f"{name}: {done}, rank {found.rank}, {_size(found.num_bytes)}, digest {found.ref.digest.hex()[:16]}")
    return 0


def unload(
    name: Name,
    target: c.Target = c.DEFAULT_TARGET,
    timeout: c.Timeout = _ACTION_SECONDS,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
) -> int:
    """Unload an adapter from every worker; requests that run keep it to their end."""
    from pagewire.v1 import admin_pb2

    request = admin_pb2.UnloadAdapterRequest(name=name)
    security = c.load_security(tls_ca, tls_cert, tls_key, auth_token_file)
    answer = _call(target, security, lambda stub, more: stub.UnloadAdapter(request, **more), timeout)
    print(f"{name}: unloaded from {answer.num_workers} worker{'s' * (answer.num_workers != 1)}")
    return 0


def list_(
    target: c.Target = c.DEFAULT_TARGET,
    timeout: c.Timeout = _ACTION_SECONDS,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
) -> int:
    """Show the adapters and the workers that have them."""
    from rich.console import Console
    from rich.table import Table

    from pagewire.v1 import admin_pb2

    security = c.load_security(tls_ca, tls_cert, tls_key, auth_token_file)
    answer = _call(
        target, security, lambda stub, more: stub.ListAdapters(admin_pb2.ListAdaptersRequest(), **more), timeout
    )
    loads: dict[tuple[str, int, bytes], list[Any]] = defaultdict(list)
    for each in answer.adapters:
        loads[each.adapter.ref.name, each.adapter.ref.generation, each.adapter.ref.digest].append(each)
    # Lines that go to a file or a pipe are not folded to some terminal's width.
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("adapter", "generation", "digest", "rank", "size", "path", "workers"):
        table.add_column(title, no_wrap=title == "adapter")
    for (name, generation, digest), entries in sorted(loads.items()):
        first = entries[0].adapter
        workers = ", ".join(sorted(entry.worker_id for entry in entries))
        number = str(generation) if generation else "at start"
        table.add_row(name, number, digest.hex()[:16], str(first.rank), _size(first.num_bytes), first.path, workers)
    console.print(table)
    return 0


def _call(target: str, security: "Security", ask: Callable[[Any, dict[str, Any]], T], timeout: float | None) -> T:
    """Raises PagewireError."""
    import grpc

    from pagewire import rpc
    from pagewire.errors import from_rpc_error
    from pagewire.v1 import admin_pb2_grpc

    with rpc.sync_channel(target, security=security) as channel:
        try:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return ask(stub, {"timeout": timeout, "metadata": security.metadata})
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} KiB"


for _name, _command in (("load", load), ("unload", unload), ("list", list_)):
    adapter.command(_name, help=help_of(_command))(_command)
