"""What a source can save, by measured rates, and which one to ask. Pure: time is an argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.transfer.plane import Plane
from pagewire.worker_view import PrefixSource
from transfer_svc.prefix import VerifiedPrefix
from transfer_svc.rates import Rates

_MAX_AVOIDED = 1024


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """When to fetch, and how long it may take: `slack` times the estimate, but at least `min_deadline` seconds."""

    mode: Literal["auto", "always", "off"] = "auto"
    min_tokens: int = 64
    min_deadline: float = 1.0
    slack: float = 4.0
    avoid_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source can save: it is to bring the blocks up to `stop` within `deadline` seconds.

    `from_tier`: it has to load some of them first.
    """

    source: PrefixSource
    stop: int
    saving: float
    deadline: float
    from_tier: bool


class Offers:
    """Of sources that have just failed there are none. `now` is any monotonic clock in seconds."""

    def __init__(self, rates: Rates, block_size: int, block_bytes: int) -> None:
        self._rates = rates
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._avoided: dict[tuple[str, int], float] = {}  # until when

    def avoid(self, source: PrefixSource, until: float) -> None:
        """Leaves the source alone for a while."""
        self._avoided[source.endpoint, source.incarnation] = until
        if len(self._avoided) > _MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]

    def best(
        self,
        prefix: VerifiedPrefix,
        sources: Sequence[PrefixSource],
        settings: FetchSettings,
        *,
        room: int,
        planes: Mapping[str, Plane],
        now: float,
        always: bool,
    ) -> tuple[Offer | None, str]:
        """The largest saving; or None and why there is none (empty: nobody has more).

        `room`: blocks that may be taken. `planes`: of the endpoints that are connected. `always`: somebody asks for it,
        whatever computing would cost.
        """
        size, here = self._block_size, prefix.num_blocks
        best: Offer | None = None
        reasons = []
        for source in sources:
            stop = min(source.num_blocks, len(prefix.keys))
            if stop <= here:
                continue
            gain = prefix.deepest(stop, room) - here
            num_bytes = prefix.num_lacking(here + gain) * self._block_bytes
            compute = self._rates.compute_seconds(gain * size)
            from_tier = here + gain > source.num_blocks - source.num_lower_blocks
            fetch = self._rates.fetch_seconds(
                source.endpoint, planes.get(source.endpoint), num_bytes, from_tier=from_tier
            )
            if self._avoided.get((source.endpoint, source.incarnation), now) > now:
                reasons.append("avoided")
            elif not always and (stop - here) * size < settings.min_tokens:
                reasons.append("short")
            elif gain * size < (1 if always else settings.min_tokens):
                reasons.append("pool")
            elif not always and settings.mode == "auto" and fetch >= compute:
                reasons.append("dearer")
            elif best is None or compute - fetch > best.saving:
                longest = settings.slack * fetch
                if not always and settings.mode == "auto":
                    longest = min(longest, compute)
                deadline = max(settings.min_deadline, longest)
                best = Offer(source, here + gain, compute - fetch, deadline, from_tier)
        return best, reasons[0] if reasons else ""
