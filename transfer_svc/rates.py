"""What fetching and computing cost here, from what they have cost lately. Pure: amounts and seconds are arguments."""

from collections import OrderedDict

from engine.rates import Link, Prior, Rate
from engine.transfer.plane import Plane

_MAX_LINKS = 1024

_PRIORS = {
    Plane.GRPC: Prior(0.01, 200e6),
    Plane.SHM_VM: Prior(0.005, 1e9),
    Plane.SHM_MAP: Prior(0.005, 1e9),
    Plane.SHM_RING: Prior(0.005, 1e9),
    Plane.NIXL: Prior(0.005, 500e6),
    Plane.TCP: Prior(0.005, 500e6),
}
_UNKNOWN = Prior(0.03, 200e6)  # a handshake comes on top


class Rates:
    """Of one worker: its prefill, and its links to others. `prior_prefill`: tokens per second before any was seen."""

    def __init__(self, prior_prefill: float = 1000.0) -> None:
        self.prefill = Rate(prior_prefill, 0.1)
        self._links: OrderedDict[tuple[str, Plane, bool], Link] = OrderedDict()

    def compute_seconds(self, num_tokens: int) -> float:
        """How long a prefill of these tokens keeps the device busy."""
        return num_tokens / self.prefill.per_second

    def fetch_seconds(self, endpoint: str, plane: Plane | None, num_bytes: int, *, from_tier: bool = False) -> float:
        """How long a fetch from there may take; `plane` None: not connected yet. `from_tier`: that worker has to load
        some of it first."""
        link = None if plane is None else self._links.get((endpoint, plane, from_tier))
        if link is None:
            link = Link(_UNKNOWN if plane is None else _PRIORS[plane])
        return link.seconds(num_bytes)

    def link(self, endpoint: str, plane: Plane, *, from_tier: bool = False) -> Link:
        """The link to be told of a fetch; the one that was used longest ago is forgotten for it."""
        name = endpoint, plane, from_tier
        link = self._links.setdefault(name, Link(_PRIORS[plane]))
        self._links.move_to_end(name)
        if len(self._links) > _MAX_LINKS:
            self._links.popitem(last=False)
        return link
