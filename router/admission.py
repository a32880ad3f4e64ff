"""Who is let in: not while the router drains or cannot serve, and no more than fits, fairly between tenants."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagewire.errors import PagewireError, ResourceExhausted, Unavailable
from pagewire.tenant_shares import TenantShares
from pagewire.worker_view import TenantQueueSnapshot
from router.observer import RequestObserver


class Admission:
    """While `obstacle` gives an error, every request gets it."""

    def __init__(
        self, max_concurrent_requests: int, observer: RequestObserver, obstacle: Callable[[], PagewireError | None]
    ) -> None:
        self._in_flight = TenantShares(max_concurrent_requests)
        self._observer = observer
        self._obstacle = obstacle
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_active(self) -> int:
        """Requests in flight."""
        return self._in_flight.total

    def by_tenant(self) -> tuple[TenantQueueSnapshot, ...]:
        """Requests in flight of each tenant that has some."""
        return tuple(TenantQueueSnapshot(name, held) for name, held in sorted(self._in_flight.by_tenant().items()))

    async def wait_idle(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()

    @contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """Counts among what is in flight. Raises why nothing may be, if so."""
        if (refusal := self._refusal(tenant)) is not None:
            self._observer.rejected(refusal)
            raise refusal
        self._in_flight.take(tenant)
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight.give_back(tenant)
            if not self.num_active:
                self._idle.set()

    def _refusal(self, tenant: str) -> PagewireError | None:
        if self.draining:
            return Unavailable("the router is draining")
        if self._in_flight.admits(tenant):
            return self._obstacle()
        return ResourceExhausted(
            f"the router has {self.num_active} requests in flight, the limit is {self._in_flight.limit}; "
            f"{self._in_flight.held(tenant)} are this tenant's",
            subject="max_concurrent_requests",
        )
