"""What all requests of a router share: placer, sessions, limits of retrying, and work that outlives a request."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Set
from dataclasses import dataclass, field

from router.breaker import Breakers
from router.decode_session import DecodeSessions
from router.explanation import Explanation
from router.placement import Demand, NoWorker, Placement, Placer


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How hard a request is tried. Seconds count from the failure."""

    max_prefills: int = 3
    max_migrations: int = 3
    # A lost worker that the fleet still believes in is avoided for this long when there is no other.
    avoid_seconds: float = 1.0
    # How long a request that has begun waits for a decode worker to appear.
    wait_seconds: float = 10.0
    poll_seconds: float = 0.05


@dataclass(slots=True)
class Services:
    """What all requests share. Tasks in `background` outlive their request (releases of tickets)."""

    placer: Placer
    sessions: DecodeSessions
    limits: RetryLimits = field(default_factory=RetryLimits)
    clock: Callable[[], float] = time.monotonic
    breakers: Breakers = field(default_factory=Breakers)
    background: set["asyncio.Task[None] | asyncio.Task[object]"] = field(default_factory=set)

    def place(self, demand: Demand, avoid: Set[tuple[str, int]] = frozenset()) -> Placement:
        """As the placer does, but workers whose breaker is open come last. Raises NoWorker."""
        now = self.clock()
        open_breakers = self.breakers.avoided(now)
        try:
            placement = self.placer.place(demand, avoid | open_breakers)
        except NoWorker:
            if not open_breakers:
                raise
            placement = self.placer.place(demand, avoid)
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self.breakers.chosen(worker.process, now)
        return placement

    def explain(self, demand: Demand) -> Explanation:
        """What `place` would do now, and why; nothing is noted."""
        open_breakers = self.breakers.avoided(self.clock())
        found = self.placer.explain(demand, open_breakers)
        # Without any other decode worker those with an open breaker are asked all the same.
        return found if found.decode_worker or not open_breakers else self.placer.explain(demand)

    def spawn(self, work: Coroutine[object, object, object]) -> None:
        """Runs it to its end, whatever happens to the request."""
        self.keep(asyncio.get_running_loop().create_task(work))

    def keep(self, task: "asyncio.Task[None] | asyncio.Task[object]") -> None:
        """Lets a task run to its end."""
        self.background.add(task)
        task.add_done_callback(self.background.discard)
