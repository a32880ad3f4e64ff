"""Asynchronous scheduling: while the device decodes one step, the host plans and starts the next.

    host     plan n+1 │ start n+1 │ wait for n │ book n, deliver │ plan n+2 │ start n+2 │ wait for n+1 │ …
    device   ─── n ───────────────────────────►│ n+1 ────────────────────────────────────────────────►│ n+2 …

The tokens of step n stay on the device and are the input of n+1; the host learns them one step later. It knows ahead
who ends by length. Who ends by a stop token is in one more step: what that draws is dropped, and its blocks stay taken
until that step has ended (`engine/late_releases.py`). Everything that has to know a token first makes the steps follow
one another as they do without this: prompts, constraints, penalties, beams, adapters, and whoever waits and may run.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from engine.request import StepOutput
from engine.sample import SampledToken
from engine.scheduler import Scheduler
from engine.sequence import Schedule, ScheduledSequence


class StartedStep(Protocol):
    """A step that runs."""

    def finish(self) -> list[list[SampledToken]]:
        """What `Runner.execute` returns, when it is there."""
        ...


class StartingRunner(Protocol):
    """A runner that need not wait for a step's end."""

    def start(self, schedule: Schedule, before: Any = None) -> StartedStep:
        """`before`: the step whose tokens the items that are ahead go on from."""
        ...


@dataclass(frozen=True, slots=True)
class _Running:
    schedule: Schedule
    step: StartedStep


class DecodePipeline:
    """At most two steps at a time, both of plain decodes."""

    def __init__(
        self, scheduler: Scheduler, runner: StartingRunner, started: Callable[[], None] = lambda: None
    ) -> None:
        """`started` is called after each start, whether it worked or not."""
        self._scheduler = scheduler
        self._started = started
        self._runner = runner
        self._running: list[_Running] = []

    @property
    def is_busy(self) -> bool:
        """A step has been started and is not booked."""
        return bool(self._running)

    def start(self, schedule: Schedule) -> None:
        """The first step, which `plain_decodes`."""
        self._start(schedule)

    def step(self) -> StepOutput:
        """Starts the step behind the running one if that can be, and books the running one."""
        first = self._running[0]
        ahead = self._scheduler.schedule_ahead(first.schedule)
        if ahead is not None:
            self._start(ahead, first.step)
        sampled = first.step.finish()
        del self._running[0]
        return self._scheduler.update(first.schedule, sampled)

    def _start(self, schedule: Schedule, before: StartedStep | None = None) -> None:
        try:
            self._running.append(_Running(schedule, self._runner.start(schedule, before)))
        finally:
            self._started()

    def abandon(self) -> set[str]:
        """Waits for what runs and forgets it; returns whose requests that were."""
        running, self._running = self._running, []
        for each in running:
            with suppress(Exception):  # it has failed already, or it will not be missed
                each.step.finish()
        return {item.sequence.request_id for each in running for item in each.schedule.items}


def plain_decodes(schedule: Schedule) -> bool:
    """Each sequence computes one token and draws one for which nothing needs to know the token before."""
    return not schedule.is_empty and all(map(_is_plain, schedule.items))


def _is_plain(item: ScheduledSequence) -> bool:
    sequence, params = item.sequence, item.sequence.params
    decodes_one = item.sample and item.num_new_tokens == 1 and len(sequence.choices_to_sample) == 1
    is_special = sequence.prefill_only or sequence.branches or sequence.wants_prompt_logprobs
    reads_tokens = sequence.is_constrained or params.has_penalties or params.drawable_logprobs
    return decodes_one and not is_special and not reads_tokens and sequence.request.adapter is None
