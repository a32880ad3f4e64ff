"""`pagewire explain-route`: where a prompt would go now, and the score of every worker."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pagewire.cli import connection as c

if TYPE_CHECKING:
    from pagewire.v1 import admin_pb2


def explain_route(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text of the prompt; - reads it from stdin.")],
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message.")] = False,
    cache_salt: Annotated[str, typer.Option("--cache-salt", metavar="SALT", help="The tenant's cache.")] = "",
    session_id: Annotated[str, typer.Option("--session-id", metavar="ID", help="As in x-session-id.")] = "",
    target: c.Target = c.DEFAULT_TARGET,
    model: c.Model = "",
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
) -> int:
    """Show where a request would go and why, without sending it."""
    import grpc

    from pagewire import rpc
    from pagewire.errors import from_rpc_error
    from pagewire.request_builder import build_generate_request
    from pagewire.v1 import admin_pb2, admin_pb2_grpc

    text = sys.stdin.read() if prompt == "-" else prompt
    asked = {"chat": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    request = admin_pb2.ExplainRouteRequest(
        request=build_generate_request(**asked, model=model, cache_salt=cache_salt), session_id=session_id
    )
    security = c.load_security(tls_ca, tls_cert, tls_key, auth_token_file)
    with rpc.sync_channel(target, security=security) as channel:
        try:
            response = admin_pb2_grpc.AdminServiceStub(channel).ExplainRoute(
                request, timeout=10.0, metadata=security.metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    _print(response)
    return 0


def _print(response: "admin_pb2.ExplainRouteResponse") -> None:
    from rich.console import Console
    from rich.table import Table

    from pagewire.v1 import types_pb2

    console = Console(width=None if sys.stdout.isatty() else 200)
    prefill = response.prefill_worker or response.decode_worker or "nobody"
    console.print(
        f"{response.num_prompt_tokens} tokens, policy {response.policy}: prefill on {prefill}, "
        f"decode on {response.decode_worker or 'nobody'} ({response.reason})",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("worker", "role"):
        table.add_column(title, no_wrap=True)
    for title in ("hit blocks", "indexed", "cost"):
        table.add_column(title, justify="right")
    table.add_column("parts, or why not")
    for worker in response.workers:
        role = types_pb2.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower()
        parts = ", ".join(f"{name} {worker.parts[name]:.6g}" for name in sorted(worker.parts))
        cost = "" if worker.obstacle else f"{worker.cost:.6g}"
        hits = str(worker.num_hit_blocks), str(worker.num_indexed_blocks)
        table.add_row(worker.worker_id, role, *hits, cost, worker.obstacle or parts)
    console.print(table)
