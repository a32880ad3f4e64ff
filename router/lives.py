"""Requests that run on workers: each life a task of its own, and what becomes of all of them when workers vanish."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pagewire.errors import DeadlineExceeded, PagewireError
from router.failure import in_the_clients_words
from router.generation import Generation
from router.observer import RequestObserver
from router.placement import Placement, Placer, Worker
from router.request import Summary, WorkerCall
from router.services import Services

_WATCH_SECONDS = 0.25


class RequestLife(Protocol):
    """One request while it runs: `Life` on workers, or what else brings its tokens to its Generation."""

    num_failed_prefills: int
    num_migrations: int
    num_class_changes: int
    num_cached_tokens: int
    accepted_at: float | None
    first_token_at: float | None
    placement: Placement | None
    prefilled_by: str
    decoded_by: str

    def start(self) -> None:
        """Sends it on its way, if that needs no waiting. What fails, `run` raises."""

    async def run(self) -> None:
        """Returns when every choice is finished; raises PagewireError."""

    async def stop(self) -> None:
        """Ends what `start` began, for a life whose `run` has not begun. Idempotent."""

    def worker_gone(self, is_alive: Callable[[Worker], bool]) -> None:
        """Workers were lost."""

    def log(self, level: int, message: str, **more: object) -> None:
        """One line about this request."""


StartLife = Callable[[Services, WorkerCall, Generation, float], RequestLife]
"""Makes a life; the number is its deadline on the services' clock."""


class Lives:
    """`start` before use, `close` at the end. `out_of_time` makes the error of a request whose deadline is over."""

    def __init__(
        self,
        services: Services,
        observer: RequestObserver,
        out_of_time: Callable[[], DeadlineExceeded],
        start_life: StartLife,
    ) -> None:
        self._services = services
        self._placer: Placer = services.placer
        self._observer = observer
        self._out_of_time = out_of_time
        self._start_life = start_life
        self._running: set[RequestLife] = set()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def running(self) -> frozenset[RequestLife]:
        """Those that run now."""
        return frozenset(self._running)

    def start(self) -> None:
        """Begins to watch for workers that vanish without a word."""
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="worker-watch")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def begin(self, call: WorkerCall, generation: Generation, deadline: float) -> RequestLife:
        """A life on its way to its workers, to be followed by `live`; the deadline is on the services' clock."""
        life = self._start_life(self._services, call, generation, deadline)
        life.start()
        return life

    async def live(self, life: RequestLife, generation: Generation, deadline: float) -> None:
        """To its end, or its deadline. In a task of its own a reader that is slow, or gone, does not hold it up."""
        self._running.add(life)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._services.clock())):
                await life.run()
        except TimeoutError:
            error = self._out_of_time()
            life.log(logging.WARNING, error.message, code=error.code.name)
            raise error from None
        except PagewireError as error:
            life.log(logging.WARNING, f"it failed: {error.message}", code=error.code.name)
            raise in_the_clients_words(error) from None
        finally:
            self._running.discard(life)
            generation.close()

    def count_faults(self, life: RequestLife) -> None:
        """Once for each life, however it ended."""
        self._observer.faults(
            num_migrations=life.num_migrations,
            num_class_changes=life.num_class_changes,
            num_failed_prefills=life.num_failed_prefills,
        )

    async def _watch(self) -> None:
        """A worker whose process hangs breaks no stream; the fleet notices its silence."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for life in list(self._running):
                life.worker_gone(self._placer.is_alive)


def summary_of(
    life: RequestLife, num_completion_tokens: int, num_prompt_tokens: int, arrived: float, now: float
) -> Summary:
    """What the client is told at the end; moments are of the services' clock."""

    def since_arrival(moment: float | None) -> float:
        return 1e3 * ((now if moment is None else moment) - arrived)

    return Summary(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        cached_tokens=life.num_cached_tokens,
        queue_ms=since_arrival(life.accepted_at),
        ttft_ms=since_arrival(life.first_token_at),
        total_ms=since_arrival(None),
        prefill_worker=life.prefilled_by,
        decode_worker=life.decoded_by,
    )
