"""gRPC servers and channels as every pagewire process makes them: limits, keepalive, health, reflection, shutdown."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.grants import AREAS_EVERYWHERE
from pagewire.health import HealthServicer
from pagewire.interceptor import RpcObserver, ServiceInterceptor
from pagewire.ports import BindError, check_bindable
from pagewire.reflection import add_reflection
from pagewire.renewed_channel import RenewedChannel
from pagewire.security import Security, token_interceptors

__all__ = [
    "BindError",
    "add_health_and_reflection",
    "bind",
    "build_server",
    "channel",
    "ready_line",
    "serve",
    "sync_channel",
]

logger = logging.getLogger(__name__)

# Largest message either side accepts. A prompt of the longest models in token ids is below 8 MiB, a KV frame at most
# 4 MiB; anything larger is refused by gRPC with RESOURCE_EXHAUSTED and both numbers.
MAX_MESSAGE_BYTES = 16 << 20
_LAST_WORDS_SECONDS = 0.2
"""For what ends by itself, as health's streams do, before the rest is cancelled."""
PLAINTEXT = Security()

Options = Sequence[tuple[str, Any]]

_COMMON_OPTIONS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A dead peer is noticed after 30 s although neither side sends anything (a long prefill, an idle session).
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: Options = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A client that pings every 10 s is at times a few ms early. By default three of those in a silent prefill end the
    # connection (GOAWAY too_many_pings); 0 never does.
    ("grpc.http2.max_ping_strikes", 0),
    # With it two servers would share a port in silence, each getting half of the connections.
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: Options = (
    *_COMMON_OPTIONS,
    # By default a new channel shares the connection of older ones to the same address, and so their backoff: a worker
    # that is back on its port would be refused for up to 2 s more.
    ("grpc.use_local_subchannel_pool", 1),
    # A worker that comes back is found within seconds; gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also what one attempt may take, on a busy machine too
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def build_server(
    *,
    security: Security = PLAINTEXT,
    observe: RpcObserver | None = None,
    areas: Mapping[str, str] = AREAS_EVERYWHERE,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    options: Options = (),
) -> grpc.aio.Server:
    """A server without ports and services. `observe` is told (method, code, seconds) of each RPC.

    Call it on the event loop that will serve. `areas`: what a token must open for which method (grants.py). `options`
    override the defaults.
    """
    return grpc.aio.server(
        interceptors=(ServiceInterceptor(security, observe, areas), *interceptors), options=(*SERVER_OPTIONS, *options)
    )


def bind(server: grpc.aio.Server, host: str, port: int, security: Security = PLAINTEXT) -> int:
    """Listens on host:port (0: the kernel chooses) and returns the port; raises BindError.

    A plain socket tries first, since it can tell why and gRPC cannot.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    check_bindable(host, port)
    try:
        if security.serves_tls:
            return server.add_secure_port(address, security.server_credentials())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise BindError(f"cannot listen on {address}: {error}") from None


def add_health_and_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> HealthServicer:
    """Adds both for the given full service names ("pagewire.v1.InferenceService"); everything is SERVING."""
    names = tuple(service_names)
    servicer = HealthServicer(names)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    add_reflection(server, (*names, health_name))
    return servicer


def channel(target: str, *, security: Security = PLAINTEXT, options: Options = ()) -> grpc.aio.Channel:
    """A channel to host:port with this project's limits and keepalive; connects on first use.

    With certificates from files, calls made after a change use the new ones.
    """
    interceptors = token_interceptors(security)
    all_options = (*CHANNEL_OPTIONS, *options)

    def connect() -> grpc.aio.Channel:
        credentials = security.channel_credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=all_options, interceptors=interceptors)
        return grpc.aio.secure_channel(target, credentials, options=all_options, interceptors=interceptors)

    return connect() if security.tls_files is None else RenewedChannel(connect, lambda: security.tls)


def sync_channel(target: str, *, security: Security = PLAINTEXT) -> grpc.Channel:
    """The same for code without an event loop. It sends no token: pass `security.metadata` with each call."""
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(target, options=list(CHANNEL_OPTIONS))
    return grpc.secure_channel(target, credentials, options=list(CHANNEL_OPTIONS))


def ready_line(role: str, endpoint: str) -> str:
    """The line on stdout by which `pagewire up` knows that a child serves."""
    return f"pagewire {role} ready {endpoint}"


async def serve(
    server: grpc.aio.Server,
    health: HealthServicer,
    *,
    ready: Callable[[], None] = lambda: None,
    drain: Callable[[], Awaitable[None]] | None = None,
    drain_timeout: float = 30.0,
    death: asyncio.Future[None] | None = None,
) -> None:
    """Starts the server, calls `ready`, and returns after SIGTERM or SIGINT and a drain.

    Drain: health says NOT_SERVING and its watchers' streams end; `drain()` lets the service finish or hand over what
    runs and end its long-lived streams; the server stops. Both together get `drain_timeout` seconds, then what still
    runs is cancelled. A second signal cancels without a drain. So does `death`, whose exception is then raised: the
    process has lost what it cannot serve without.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    def on_death(_: object) -> None:
        first.set()
        second.set()

    if death is not None:
        death.add_done_callback(on_death)
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        await server.start()
        ready()
        await first.wait()
        logger.info("stopping at once" if second.is_set() else "draining")
        health.close()
        await _drain(server, drain, drain_timeout, second)
        logger.info("stopped")
        if death is not None and death.done() and (error := death.exception()) is not None:
            raise error
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _drain(
    server: grpc.aio.Server, drain: Callable[[], Awaitable[None]] | None, timeout: float, hurry: asyncio.Event
) -> None:
    async def finish() -> None:
        if drain is not None:
            await drain()
        # Refuses new calls and waits for those that run; the timeout is outside.
        await server.stop(None if timeout <= 0 else timeout)

    finishing = asyncio.ensure_future(finish())
    hurrying = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((finishing, hurrying), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not finishing.done():
        logger.warning(
            "drain cut short%s: cancelling what still runs", "" if hurry.is_set() else f" after {timeout:g} s"
        )
        await server.stop(_LAST_WORDS_SECONDS)
        finishing.cancel()
    await asyncio.gather(finishing, hurrying, return_exceptions=True)
    await server.stop(None)
    if not finishing.cancelled() and (error := finishing.exception()) is not None:
        raise error
