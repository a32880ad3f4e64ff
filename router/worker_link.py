"""The router's link to one address: a channel, and a WatchWorker stream whose silence means that the worker is gone."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import grpc

from pagewire.v1 import worker_pb2, worker_pb2_grpc
from pagewire.worker_view import AdapterView, LoadSnapshot, WorkerDescription
from pagewire.worker_view_wire import adapter_from_proto, info_from_proto, load_from_proto
from router.identity import ROUTER_ID

logger = logging.getLogger(__name__)

_FIRST_BACKOFF, _LAST_BACKOFF = 0.1, 1.0


class WorkerLink:
    """Watches one address for ever, whoever lives there. `on_change` is called after each message and each loss.

    `description` is the last process seen there, also when it is dead. The channel stays the same; it reconnects by
    itself, and the calls of requests share it.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        on_change: Callable[["WorkerLink"], None],
        *,
        silence_seconds: float = 5.0,
    ) -> None:
        self.address = address
        self.channel = channel
        self.description: WorkerDescription | None = None
        self.load = LoadSnapshot()
        self.alive = False
        self.dead_since = asyncio.get_running_loop().time()
        self._on_change = on_change
        self._silence_seconds = silence_seconds
        self._task = asyncio.create_task(self._run(), name=f"watch {address}")

    async def stop(self) -> None:
        """Ends the watch and closes the channel with all calls on it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.alive = False
        await self.channel.close()

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            try:
                await self._watch()
                problem = "it ended the watch"
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            except TimeoutError:
                problem = f"silent for {self._silence_seconds:g} s"
            except ValueError as error:
                problem = str(error)
            except Exception as error:
                # Without this the worker would never be seen again.
                logger.exception("the watch of %s failed and starts over", self.address)
                problem = type(error).__name__
            if self.alive:
                self.alive = False
                self.dead_since = asyncio.get_running_loop().time()
                backoff = _FIRST_BACKOFF
                logger.warning("lost worker at %s: %s", self.address, problem)
            else:
                logger.debug("no worker at %s: %s", self.address, problem)
            self._on_change(self)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF)

    async def _watch(self) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        call = stub.WatchWorker(worker_pb2.WatchWorkerRequest(router_id=ROUTER_ID))
        adapters: tuple[AdapterView, ...] = ()
        try:
            while True:
                async with asyncio.timeout(self._silence_seconds):
                    response = await call.read()
                if not isinstance(response, worker_pb2.WatchWorkerResponse):
                    return  # grpc.aio.EOF
                if response.HasField("info"):
                    self.description = info_from_proto(response.info)
                elif not self.alive:
                    raise ValueError("the first message does not say who it is")
                if response.HasField("adapters"):
                    adapters = tuple(map(adapter_from_proto, response.adapters.adapters))
                self.load = replace(load_from_proto(response.load), adapters=adapters)
                self.alive = True
                self._on_change(self)
        finally:
            call.cancel()
