"""`pagewire status`: the workers a router (or one worker) knows, as a table."""

import sys
from typing import TYPE_CHECKING

from pagewire.cli import connection as c

if TYPE_CHECKING:
    from pagewire.security import Security
    from pagewire.v1 import admin_pb2


def fetch_status(target: str, security: "Security", timeout: float = 10.0) -> "admin_pb2.GetStatusResponse":
    """AdminService.GetStatus; raises PagewireError."""
    import grpc

    from pagewire import rpc
    from pagewire.errors import from_rpc_error
    from pagewire.v1 import admin_pb2, admin_pb2_grpc

    with rpc.sync_channel(target, security=security) as channel:
        try:
            return admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
                admin_pb2.GetStatusRequest(), timeout=timeout, metadata=security.metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def status(
    target: c.Target = c.DEFAULT_TARGET,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
) -> int:
    """Show workers, their load (requests) and their caches (blocks)."""
    response = fetch_status(target, c.load_security(tls_ca, tls_cert, tls_key, auth_token_file))
    _print(target, response)
    return 0


def _print(target: str, response: "admin_pb2.GetStatusResponse") -> None:
    from rich.console import Console
    from rich.table import Table

    from pagewire.v1 import types_pb2

    # Lines that go to a file or a pipe are not folded to some terminal's width.
    console = Console(width=None if sys.stdout.isatty() else 200)
    head = f"{response.process} {target} (pagewire {response.version}): {response.num_requests} requests"
    if response.process == "router":
        head += f", index {response.index_state} with {response.num_indexed_blocks} blocks"
    console.print(head + (", draining" if response.draining else ""), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("worker", "role", "state", "endpoint", "model"):
        table.add_column(title, no_wrap=title in ("worker", "endpoint"))
    for title in ("running", "waiting", "free", "cached", "held"):
        table.add_column(title, justify="right")
    for worker in response.workers:
        info, load = worker.info, worker.load
        role = types_pb2.WorkerRole.Name(info.role).removeprefix("WORKER_ROLE_").lower()
        state = "lost" if not worker.alive else "draining" if load.draining else "alive"
        table.add_row(
            info.worker_id,
            role,
            state,
            info.endpoint,
            info.model,
            str(load.num_running),
            str(load.num_waiting),
            f"{load.num_free_blocks}/{info.num_blocks}",
            str(worker.num_cached_blocks),
            str(load.num_held_blocks),
        )
    console.print(table)
