"""The step loop: one thread owns the device; everybody else talks to it through one queue.

any thread   add, abort, call ──► commands ──┐
device thread                                ├─► commands between steps, then a step ──► deliver(StepOutput)
                                             └─► nothing to do: sleeps on a condition
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

from engine.engine import Engine
from engine.errors import EngineDied, EngineError, EngineStopped, RequestRefused
from engine.request import EngineRequest, RequestFailed, StepOutput
from engine.turns import turns_of_environment
from pagewire.trace import log_fields, new_error_id

T = TypeVar("T")

STALL_SECONDS = 0.002
"""Pause before the next try when requests wait for blocks that transfers hold; any command ends it early."""
LAST_STEP_SECONDS = 10.0
"""For the step that runs when the loop is to stop; then the other ranks, of which one may hang, are killed."""

logger = logging.getLogger(__name__)


class EngineLoop:
    """Runs `engine` on a thread of its own. `deliver` is called on that thread, once a step; it must be quick.

    When `deliver` raises it must not have taken over `held` blocks: the requests of that output are failed and their
    blocks are freed. A thread that cannot go on (not even that worked) puts the error into `engine.death` and ends.
    """

    def __init__(self, engine: Engine, deliver: Callable[[StepOutput], None]) -> None:
        self._engine = engine
        self._deliver_to = deliver
        self._turns = turns_of_environment()
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._queued_ids: set[str] = set()
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pagewire-engine", daemon=True)
        if engine.tiers is not None:
            engine.tiers.load_ended = self._go_on

    @property
    def error(self) -> BaseException | None:
        """Why the thread has ended by itself; None while it runs or was stopped."""
        return self._error

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestRefused at once (its `adopted` blocks are released), EngineStopped later."""
        try:
            self._engine.check(request)
            with self._wake:
                if request.request_id in self._queued_ids or request.request_id in self._engine:
                    raise RequestRefused("request_id", f"{request.request_id!r} is in use already")
                self._enqueue(lambda: self._add(request))
                self._queued_ids.add(request.request_id)
        except EngineError:
            self._engine.release_adopted(request)
            raise

    def abort(self, request_id: str) -> None:
        """Frees everything the request has, between two steps. Unknown ids and a stopped loop are fine."""
        with self._wake:
            if not self._stopping:
                self._enqueue(lambda: self._abort(request_id))

    def fail(self, request_ids: Sequence[str], message: str, *, field: str = "", error_id: str = "") -> None:
        """Delivers RequestFailed for each, whether it still runs or not. A stopped loop is fine."""
        with self._wake:
            if not self._stopping:
                self._enqueue(lambda: self._deliver(_named(self._engine.fail(request_ids, message, field), error_id)))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs `function` on the device thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopping:
                    raise EngineStopped("the engine has stopped")
                future.set_result(function(self._engine))
            except Exception as error:  # belongs to the caller
                future.set_exception(error)

        with self._wake:
            self._enqueue(run)
        return future

    def stop(self) -> None:
        """Fails what still runs, ends the thread and waits for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(LAST_STEP_SECONDS)
            if self._thread.is_alive():
                self._engine.give_up_step()
                self._thread.join()
        if self._turns is not None:
            self._turns.close()
            self._turns = None

    def _go_on(self) -> None:
        """A load has ended, on another thread: whoever waits for it is tried again at once."""
        with self._wake:
            if not self._stopping:
                self._enqueue(lambda: None)

    def _enqueue(self, command: Callable[[], None]) -> None:
        if self._stopping:
            raise EngineStopped("the engine has stopped")
        self._commands.append(command)
        self._wake.notify()

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except Exception as error:
            error_id = ""
            if not isinstance(error, EngineError):
                error_id = new_error_id()
                fields = log_fields(request.request_id, request.trace_id, error_id=error_id)
                logger.exception("request %s could not be added", request.request_id, extra=fields)
            self._deliver(StepOutput(failed=[RequestFailed(request.request_id, str(error), error_id)]))
        finally:
            with self._wake:
                self._queued_ids.discard(request.request_id)

    def _abort(self, request_id: str) -> None:
        if self._engine.abort(request_id) and not self._engine.has_work:
            self._deliver(StepOutput(load=self._engine.load()))  # no step will tell that the engine is idle

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                if self._engine.has_work:
                    self._step()
                self._rest()
            self._end()
        except BaseException as error:
            self._die(error)

    def _end(self, reason: str = "the engine has stopped") -> None:
        """Answers what waits in the queue and fails what still runs."""
        self._run_commands()
        self._deliver(self._engine.fail_all(reason))

    def _die(self, error: BaseException) -> None:
        logger.critical("the device thread cannot go on", exc_info=error)
        with self._wake:
            self._stopping = True
        self._error = error
        self._engine.die(error)
        try:
            if isinstance(error, EngineDied):
                self._end(f"the engine has died: {error}")
            else:
                self._end()
        except BaseException:
            logger.exception("what the dead device thread had left could not be given up")

    def _rest(self) -> None:
        """Sleeps while there is nothing to do."""
        with self._wake:
            if self._commands or self._stopping:
                return
            if not self._engine.has_work:
                self._wake.wait()
            elif self._engine.is_stalled:
                self._wake.wait(STALL_SECONDS)

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def _step(self) -> None:
        with nullcontext() if self._turns is None else self._turns.one():
            output, seconds = self._timed_step()
        if self._engine.tiers is not None:
            self._engine.tiers.observe_prefill(output.num_prefill_tokens, seconds)
        self._deliver(replace(output, seconds=seconds, ended_at=time.time()))

    def _timed_step(self) -> tuple[StepOutput, float]:
        started_at = time.perf_counter()
        try:
            output = self._engine.step()
        except EngineDied:
            raise
        except Exception as error:
            error_id = new_error_id()
            logger.exception("a step failed; its requests are given up", extra={"error_id": error_id})
            output = _named(self._engine.fail_step(f"{type(error).__name__}: {error}"), error_id)
        return output, time.perf_counter() - started_at

    def _deliver(self, output: StepOutput) -> None:
        try:
            self._deliver_to(output)
        except Exception as error:
            error_id = new_error_id()
            fields = {"error_id": error_id}
            logger.exception("a step's output could not be delivered; its requests are given up", extra=fields)
            for held in output.held:
                self._engine.kv_cache.release(held.all_block_ids)
            reason = f"its output was lost: {type(error).__name__}: {error}"
            self._deliver_to(_named(self._engine.fail(output.request_ids(), reason), error_id))


def _named(output: StepOutput, error_id: str) -> StepOutput:
    """The failures bear the id that the log has."""
    return replace(output, failed=[replace(failed, error_id=error_id) for failed in output.failed])
