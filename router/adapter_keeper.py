"""Gives workers that have started anew the adapters that were loaded over AdminService before."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import grpc

from pagewire.errors import from_rpc_error
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.worker_view import AdapterLabel, AdapterView
from router.adapter_memory import AdapterMemory, Told
from router.cost import Process
from router.fleet import Fleet
from router.prefix_admin import ACTION_SECONDS

LOAD_SECONDS = 120.0
_RETRY_SECONDS = 1.0
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)

logger = logging.getLogger(__name__)


class AdapterKeeper:
    """`look` whenever the fleet has changed. The same load comes back: same content, same generation, same block keys.

    Several routers may do it at once: a load that is there already changes nothing.
    """

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet = fleet
        self._model = model
        self._memory = AdapterMemory()
        self._tasks: dict[Process, asyncio.Task[None]] = {}
        self._is_closed = False

    def complete(self, present: Mapping[str, AdapterLabel]) -> Mapping[str, AdapterLabel]:
        """By name, with the loads that come back as soon as a worker can take them."""
        kept = self._memory.labels
        return present if kept.keys() <= present.keys() else {**kept, **present}

    def forget(self, name: str) -> bool:
        """The name is being unloaded; False if it was not loaded at run time."""
        return self._memory.forget(name)

    def look(self) -> None:
        """Notes what workers have; who lacks something gets it."""
        if self._is_closed:
            return
        told = [
            Told((worker.description.worker_id, worker.description.incarnation), worker.load.adapters)
            for worker in self._fleet.workers().values()
            if worker.is_available and worker.description.model == self._model
        ]
        for process, views in self._memory.observe(told).items():
            if process not in self._tasks:
                self._tasks[process] = asyncio.create_task(self._give(process, views), name=f"adapters {process[0]}")
        for process, labels in self._memory.unwanted().items():
            if process not in self._tasks:
                task = asyncio.create_task(self._withdraw(process, labels), name=f"adapters {process[0]}")
                self._tasks[process] = task

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _give(self, process: Process, views: Sequence[AdapterView]) -> None:
        try:
            for view in views:
                worker = self._fleet.find(*process)
                if worker is None or not worker.alive:
                    return
                if not self._memory.wants(view.label):
                    continue
                is_over = await self._load(worker.channel, process, view)
                if self._memory.is_over(view.label):  # unloaded or taken back meanwhile, where it was already
                    is_over = await self._take_back(worker.channel, process, view.label)
                if not is_over:
                    await asyncio.sleep(_RETRY_SECONDS)
                    return
        finally:
            del self._tasks[process]

    async def _withdraw(self, process: Process, labels: Sequence[AdapterLabel]) -> None:
        try:
            for label in labels:
                worker = self._fleet.find(*process)
                if worker is None or not worker.alive:
                    return
                if not await self._take_back(worker.channel, process, label):
                    await asyncio.sleep(_RETRY_SECONDS)
                    return
        finally:
            del self._tasks[process]

    async def _load(self, channel: grpc.aio.Channel, process: Process, view: AdapterView) -> bool:
        """False if it is worth another try."""
        label = view.label
        self._memory.give(process, label)
        message = admin_pb2.LoadAdapterRequest(
            name=label.name, path=view.path, generation=label.generation, digest=label.digest
        )
        try:
            # The stub's type is that of the sync API.
            await admin_pb2_grpc.AdminServiceStub(channel).LoadAdapter(message, timeout=LOAD_SECONDS)
        except grpc.RpcError as error:
            reason, is_final = from_rpc_error(error), error.code() in _FINAL
            logger.warning(
                "worker %s did not get adapter %r back%s: %s",
                process[0],
                label.name,
                "" if is_final else ", it will be tried again",
                reason.message,
            )
            if is_final:
                self._memory.settle(process, label)
            return is_final
        logger.info("worker %s got adapter %r back, generation %d", process[0], label.name, label.generation)
        self._memory.settle(process, label)
        return True

    async def _take_back(self, channel: grpc.aio.Channel, process: Process, label: AdapterLabel) -> bool:
        """Also a load that is still being read there. False if there was no answer."""
        message = admin_pb2.UnloadAdapterRequest(name=label.name, generation=label.generation)
        try:
            await admin_pb2_grpc.AdminServiceStub(channel).UnloadAdapter(message, timeout=ACTION_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                reason = from_rpc_error(error).message
                logger.warning("adapter %r was not taken back from worker %s: %s", label.name, process[0], reason)
                return False
        self._memory.withdraw(process, label)
        return True
