"""`pagewire health`: asks a process `grpc.health.v1`, for containers' health checks and scripts."""

from typing import Annotated

import typer

from pagewire.cli import connection as c
from pagewire.cli.failure import CommandFailed


def health(
    target: c.Target = c.DEFAULT_TARGET,
    service: Annotated[
        str, typer.Option("--service", metavar="NAME", help="Full name of the service.", show_default="the process")
    ] = "",
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Deadline.")] = 3.0,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
) -> int:
    """Exit with 0 if a process, or one of its services, is SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pagewire import rpc
    from pagewire.errors import from_rpc_error

    security = c.load_security(tls_ca, tls_cert, tls_key, None)
    with rpc.sync_channel(target, security=security) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    typer.echo(status)
    if status != "SERVING":
        raise CommandFailed(f"{target} {service or 'process'} is {status}")
    return 0
