"""The bound on requests that were accepted but have not started: beyond it, RESOURCE_EXHAUSTED with RetryInfo."""

import grpc

from pagewire.errors import PagewireError, ResourceExhausted, Unavailable
from pagewire.tenant_shares import TenantShares
from pagewire.worker_view import TenantQueueSnapshot


class AdmissionQueue:
    """Requests by id with their tenant and prompt tokens, until they start or end. One event loop owns it.

    Fair between tenants, as in `TenantShares`: one that floods is refused, the others still get their share.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.draining = False
        self._requests = TenantShares(max_requests)
        self._tokens = TenantShares(max_tokens)
        self._waiting: dict[str, tuple[str, int, int]] = {}
        self._num_expected_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens.total

    @property
    def num_tokens_to_compute(self) -> int:
        """Those of them that are not expected to be there when their request starts."""
        return self._tokens.total - self._num_expected_tokens

    def by_tenant(self) -> tuple[TenantQueueSnapshot, ...]:
        """What waits, of each tenant that has something."""
        held = self._requests.by_tenant()
        return tuple(TenantQueueSnapshot(name, held[name], self._tokens.held(name)) for name in sorted(held))

    def enter(self, request_id: str, num_tokens: int, tenant: str = "", *, num_expected_tokens: int = 0) -> None:
        """Takes a place; raises Unavailable while draining and ResourceExhausted when full.

        Of its tokens, `num_expected_tokens` will probably be cached or come from elsewhere; one is always computed.

        A request longer than `max_tokens` gets in when nobody waits, else it could never run.
        """
        if self.draining:
            raise Unavailable("this worker is draining; another one must take the request")
        if request_id in self._waiting:
            raise duplicate_request(request_id)
        if not self._requests.admits(tenant):
            raise ResourceExhausted(
                f"{len(self._waiting)} requests wait, max_queued_requests is {self._requests.limit}; "
                f"{self._requests.held(tenant)} are this tenant's",
                subject="max_queued_requests",
            )
        if self._waiting and not self._tokens.admits(tenant, num_tokens):
            raise ResourceExhausted(
                f"{self.num_tokens} prompt tokens wait and {num_tokens} more are asked for, "
                f"max_queued_tokens is {self._tokens.limit}; {self._tokens.held(tenant)} are this tenant's",
                subject="max_queued_tokens",
            )
        num_expected_tokens = max(0, min(num_expected_tokens, num_tokens - 1))
        self._waiting[request_id] = tenant, num_tokens, num_expected_tokens
        self._num_expected_tokens += num_expected_tokens
        self._requests.take(tenant)
        self._tokens.take(tenant, num_tokens)

    def leave(self, request_id: str) -> None:
        """It started or ended; unknown ids are fine."""
        if (place := self._waiting.pop(request_id, None)) is not None:
            tenant, num_tokens, num_expected_tokens = place
            self._num_expected_tokens -= num_expected_tokens
            self._requests.give_back(tenant)
            self._tokens.give_back(tenant, num_tokens)


def duplicate_request(request_id: str) -> PagewireError:
    """What a second request under an id that is in use gets."""
    return PagewireError(
        f"request id {request_id!r} is in use; ids are unique per attempt", code=grpc.StatusCode.ALREADY_EXISTS
    )
