"""A circuit breaker for each worker process: one that keeps failing gets no requests for a while. Pure, time comes in.

    closed ──num_failures in a row──► open ──its backoff is over──► half-open ──success──► closed
                                        ▲                              │ one probe at a time
                                        └──────failure, backoff x 2────┘

A breaker is advice: when nobody else can take a request, a worker whose breaker is open is asked all the same.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

logger = logging.getLogger(__name__)

Process = tuple[str, int]


class BreakerState(Enum):
    """The values are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When to open, and for how many seconds."""

    num_failures: int = 3
    first_backoff: float = 0.5
    last_backoff: float = 30.0


@dataclass(slots=True)
class Breaker:
    """One process. `probe_at` is when the request was sent that half-open waits for."""

    state: BreakerState = BreakerState.CLOSED
    num_failures: int = 0
    backoff: float = 0.0
    until: float = 0.0
    probe_at: float | None = None


# (worker id, state); None: the worker is gone.
BreakerListener = Callable[[str, BreakerState | None], None]


@dataclass(slots=True)
class Breakers:
    """The breakers of a fleet; a process that never failed has none."""

    policy: BreakerPolicy = field(default_factory=BreakerPolicy)
    on_change: BreakerListener = lambda worker_id, state: None
    _breakers: dict[Process, Breaker] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._breakers)

    def state(self, process: Process) -> BreakerState:
        """As of the last event; an open one whose backoff is over becomes half-open when somebody asks for it."""
        breaker = self._breakers.get(process)
        return BreakerState.CLOSED if breaker is None else breaker.state

    def avoided(self, now: float) -> frozenset[Process]:
        """Who should get no request now: open, or half-open with a probe under way."""
        return frozenset(process for process, breaker in self._breakers.items() if not self._is_free(breaker, now))

    def chosen(self, process: Process, now: float) -> None:
        """A request goes there: the probe, if the backoff is over."""
        breaker = self._breakers.get(process)
        if breaker is None or breaker.state is BreakerState.CLOSED or not self._is_free(breaker, now):
            return
        breaker.probe_at = now
        self._change(process, breaker, BreakerState.HALF_OPEN, "its backoff is over, one request tries it")

    def succeeded(self, process: Process) -> None:
        """It did what it was asked for."""
        breaker = self._breakers.pop(process, None)
        if breaker is not None and breaker.state is not BreakerState.CLOSED:
            self._change(process, breaker, BreakerState.CLOSED, "it works again")

    def failed(self, process: Process, now: float, reason: str) -> None:
        """It was lost or broke; refusals for lack of room and errors about the request don't count."""
        breaker = self._breakers.setdefault(process, Breaker())
        breaker.num_failures += 1
        if breaker.state is BreakerState.OPEN and now < breaker.until:
            return  # what was under way when it opened
        if breaker.state is BreakerState.CLOSED and breaker.num_failures < self.policy.num_failures:
            return
        breaker.backoff = min(max(2 * breaker.backoff, self.policy.first_backoff), self.policy.last_backoff)
        breaker.until, breaker.probe_at = now + breaker.backoff, None
        reason = f"{breaker.num_failures} failures in a row, no requests for {breaker.backoff:g} s; the last: {reason}"
        self._change(process, breaker, BreakerState.OPEN, reason)

    def keep_only(self, processes: Collection[Process]) -> None:
        """Everybody else is gone, restarted ones too."""
        kept = set(processes)
        for process in self._breakers.keys() - kept:
            del self._breakers[process]
            self.on_change(process[0], None)

    def _is_free(self, breaker: Breaker, now: float) -> bool:
        if breaker.state is BreakerState.CLOSED:
            return True
        # A probe that nobody reports on (its client left) must not block the worker for ever.
        is_probed = breaker.probe_at is not None and now < breaker.probe_at + breaker.backoff
        return now >= breaker.until and not is_probed

    def _change(self, process: Process, breaker: Breaker, state: BreakerState, why: str) -> None:
        if state is breaker.state and state is not BreakerState.OPEN:
            return
        breaker.state = state
        level = logging.INFO if state is BreakerState.CLOSED else logging.WARNING
        fields = {"worker_id": process[0], "breaker": state.name.lower()}
        logger.log(level, "breaker of worker %s is %s: %s", process[0], state.name.lower(), why, extra=fields)
        self.on_change(process[0], state)
