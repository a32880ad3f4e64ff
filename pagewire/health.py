"""`grpc.health.v1` for asyncio, with a Watch that ends when the process drains.

grpcio-health-checking's own servicer never ends a Watch, so each open one would hold `server.stop` for its whole grace.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Status of "" (the process) and of each service. Setters are plain calls, made on the event loop's thread."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._status = dict.fromkeys(("", *service_names), SERVING)
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, service: str, *, serving: bool) -> None:
        """Changes one service's status and tells its watchers. After `close` it stays NOT_SERVING."""
        self._status[service] = SERVING if serving and not self._closed else NOT_SERVING
        self._announce()

    def set_all(self, *, serving: bool) -> None:
        """Changes the status of the process and of all its services."""
        for service in self._status:
            self.set(service, serving=serving)

    def close(self) -> None:
        """NOT_SERVING for good; watchers get that and then the end of their stream."""
        self._closed = True
        self.set_all(serving=False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            # Taken together: what changes while the message is sent is seen by the next round.
            changed, closed = self._changed, self._closed
            status = self._status.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if closed:
                return
            await changed.wait()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
