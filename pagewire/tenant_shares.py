"""A bound that tenants share: when it is reached, whoever has more than a fair share is refused first. Pure.

below the limit        everybody gets in: a tenant alone has all of it
at the limit           a tenant with less than limit / (number of tenants) still gets in, whoever filled it
at twice the limit     nobody: names of tenants are the clients' to choose
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TenantShares:
    """What each tenant holds of something that has `limit` units. One event loop owns it."""

    limit: int
    total: int = 0
    _held: dict[str, int] = field(default_factory=dict)

    def held(self, tenant: str) -> int:
        """Units that a tenant holds."""
        return self._held.get(tenant, 0)

    def by_tenant(self) -> dict[str, int]:
        """Everybody who holds something."""
        return dict(self._held)

    def share(self, tenant: str) -> int:
        """The units that a tenant may hold at the limit: all, as long as nobody else holds any, and always one."""
        return max(1, self.limit // (len(self._held) + (tenant not in self._held)))

    def admits(self, tenant: str, amount: int = 1) -> bool:
        """True if the tenant may take so much more."""
        if self.total + amount <= self.limit:
            return True
        return self.held(tenant) + amount <= self.share(tenant) and self.total + amount <= 2 * self.limit

    def take(self, tenant: str, amount: int = 1) -> None:
        """It holds so much more; whether it may is the caller's to ask."""
        self._held[tenant] = self.held(tenant) + amount
        self.total += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """It holds so much less."""
        self.total -= amount
        left = self._held[tenant] - amount
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]
