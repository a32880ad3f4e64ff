"""uvicorn inside the router's event loop: listens, and ends when the router ends, not when a signal comes."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pagewire.config import ProcessConfig
from pagewire.ports import BindError, check_bindable
from pagewire.tls import TlsFiles

logger = logging.getLogger(__name__)

# Longer than clients keep a connection in their pools, so that it is they who close it.
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 1024


class _Server(uvicorn.Server):
    """Signals are the router's own affair."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """`start`, then `drain` once no request is left, `close` in any case. `port` is the bound one."""

    def __init__(self, app: ASGIApp, config: ProcessConfig, port: int) -> None:
        """Binds at once; raises BindError, or ConfigError for certificates that cannot be used."""
        options = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        options.load()
        if config.tls_cert is not None:
            # As for gRPC: with an authority, callers must show a certificate signed by it.
            options.ssl = TlsFiles(config.tls_cert, config.tls_key, config.tls_ca).watch_context("the HTTP API")
        self._server = _Server(options)
        self._socket = _listen(config.host, port)
        self.port = int(self._socket.getsockname()[1])
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to serve."""
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._socket]), name="http-server")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended by itself")
            await asyncio.sleep(0.005)

    async def drain(self) -> None:
        """Listens no longer, and returns when the last answer is sent and every connection is closed."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def close(self) -> None:
        """Breaks what is left, which cancels the requests behind it."""
        self._server.should_exit = self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        tasks = list(self._server.server_state.tasks)
        if self._serving is not None:
            await asyncio.gather(self._serving, *tasks, return_exceptions=True)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    check_bindable(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise BindError(f"cannot listen on {host}:{port}: {error.strerror}") from None
