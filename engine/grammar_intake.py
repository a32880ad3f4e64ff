"""Requests whose grammar is still to be compiled: on a thread of its own, so that nobody else waits for it."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from engine.engine import Engine
from engine.errors import EngineError, RequestRefused
from engine.loop import EngineLoop
from engine.request import EngineRequest
from pagewire.grammar import GrammarError

logger = logging.getLogger(__name__)


class GrammarIntake:
    """Lives on the event loop. Before `close` comes `cancel_all`."""

    def __init__(self, engine: Engine, engine_loop: EngineLoop) -> None:
        self._engine = engine
        self._engine_loop = engine_loop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._by_request: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, request: EngineRequest) -> None:
        """Queues it once its grammar is there; raises RequestRefused. `adopted` blocks are the engine's in either case.

        A grammar that cannot be compiled fails the request in a step's output.
        """
        try:
            self._engine.check(request)
        except RequestRefused:
            self._engine.release_adopted(request)
            raise
        task = asyncio.get_running_loop().create_task(self._compile(request), name="grammar")
        self._by_request[request.request_id] = task
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._compiled(task, request))

    def cancel(self, request_id: str) -> None:
        """Unknown ids are fine."""
        if (task := self._by_request.pop(request_id, None)) is not None:
            task.cancel()  # if it waits for the thread it need not any more

    async def cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._thread.shutdown(cancel_futures=True)

    def _compiled(self, task: asyncio.Task[None], request: EngineRequest) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._engine.release_adopted(request)

    async def _compile(self, request: EngineRequest) -> None:
        request_id, structure = request.request_id, request.params.structured_output
        if structure is None:
            raise ValueError(f"request {request_id} has no structured output")
        field, loop = "", asyncio.get_running_loop()
        try:
            grammar = await loop.run_in_executor(self._thread, self._engine.grammars.compile, structure)
            self._by_request.pop(request_id, None)
            self._engine_loop.add(replace(request, grammar=grammar))
            return
        except EngineError as error:
            reason = str(error)  # the loop has released what was adopted
        except Exception as error:
            self._engine.release_adopted(request)
            reason = str(error)
            if isinstance(error, GrammarError):
                field = f"params.structured_output.{structure.kind}"
            else:
                logger.exception("the grammar of request %s could not be compiled", request_id)
        self._by_request.pop(request_id, None)
        self._engine_loop.fail([request_id], reason, field=field)
