"""The services every worker has, whatever its role: WorkerService (who am I, how busy) and AdminService."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import grpc

from pagewire.errors import ADAPTER_NOT_FOUND, InvalidArgument, NotFound
from pagewire.prefix_control import Prefix, PrefixControl, check_adapter_name, check_salt, check_ttl, prefix_of
from pagewire.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from pagewire.worker_view import AdapterView, WorkerView
from pagewire.worker_view_wire import (
    adapter_to_proto,
    holding_to_proto,
    info_to_proto,
    label_from_proto,
    load_to_proto,
    move_sources_from_proto,
    status_to_proto,
)

SHORTEST_PERIOD = 0.1
LONGEST_PERIOD = 1.0
SERVICE_NAMES = ("pagewire.v1.WorkerService", "pagewire.v1.AdminService")
_Context = grpc.aio.ServicerContext[Any, Any]


_AboutPrefix = (
    admin_pb2.LookUpPrefixRequest
    | admin_pb2.PinPrefixRequest
    | admin_pb2.ClearPrefixRequest
    | admin_pb2.MovePrefixRequest
)


def new_generation() -> int:
    """A number for a load: random, so that no two loads in a cluster have the same, and later ones are greater."""
    return (time.time_ns() // 1_000_000) << 20 | secrets.randbits(20)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Streams the load: at once, on change at most every 100 ms, and at least every second."""

    def __init__(self, worker: WorkerView) -> None:
        self._worker = worker
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ends every watch; the process is about to stop."""
        self._closed.set()

    async def WatchWorker(
        self, request: worker_pb2.WatchWorkerRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.WatchWorkerResponse]:
        with self._worker.router_presence(request.router_id):
            async with aclosing(self._watch()) as responses:
                async for response in responses:
                    yield response

    async def _watch(self) -> AsyncGenerator[worker_pb2.WatchWorkerResponse]:
        response = worker_pb2.WatchWorkerResponse(info=info_to_proto(self._worker.description))
        adapters: tuple[AdapterView, ...] = ()
        while not self._closed.is_set():
            load = self._worker.load()
            response.load.CopyFrom(load_to_proto(load))
            if load.adapters != adapters:
                adapters = load.adapters
                response.adapters.SetInParent()
                response.adapters.adapters.extend(map(adapter_to_proto, adapters))
            yield response
            response = worker_pb2.WatchWorkerResponse()
            sent_at = time.monotonic()
            while not self._closed.is_set() and self._worker.load() == load:
                left = sent_at + LONGEST_PERIOD - time.monotonic()
                if left <= 0 or not await self._wait(left):
                    break
            if not self._closed.is_set():
                await asyncio.sleep(max(0.0, sent_at + SHORTEST_PERIOD - time.monotonic()))

    async def _wait(self, timeout: float) -> bool:
        """True if the load may have changed, or the watch must end; False after `timeout` seconds."""
        waits = [asyncio.ensure_future(self._worker.wait_for_change()), asyncio.ensure_future(self._closed.wait())]
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in waits:
                waiting.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return bool(done)


class WorkerAdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService of a worker: it answers for itself. `on_drain` is called when a drain begins."""

    def __init__(
        self, worker: WorkerView, prefixes: PrefixControl, on_drain: Callable[[], None] = lambda: None
    ) -> None:
        self._worker = worker
        self._prefixes = prefixes
        self._on_drain = on_drain

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: _Context) -> admin_pb2.GetStatusResponse:
        load = self._worker.load()
        return admin_pb2.GetStatusResponse(
            process=self._worker.description.role,
            version=version("pagewire"),
            workers=[status_to_proto(self._worker.description, load, self._worker.status())],
            draining=load.draining,
        )

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        self._check_is_me(request.worker_id)
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=await self._worker.reset_prefix_cache())

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        self._check_is_me(request.worker_id)
        self._on_drain()
        self._worker.start_drain()
        return admin_pb2.DrainResponse(num_requests=self._worker.status().num_requests)

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: _Context
    ) -> admin_pb2.LoadAdapterResponse:
        generation = request.generation or new_generation()
        loaded = await self._worker.load_adapter(
            request.name, request.path, generation, check_only=request.check_only, digest=request.digest
        )
        return admin_pb2.LoadAdapterResponse(adapter=adapter_to_proto(loaded))

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: _Context
    ) -> admin_pb2.UnloadAdapterResponse:
        was_here = self._worker.unload_adapter(request.name, request.generation)
        return admin_pb2.UnloadAdapterResponse(num_workers=int(was_here))

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: _Context
    ) -> admin_pb2.ListAdaptersResponse:
        me = self._worker.description.worker_id
        return admin_pb2.ListAdaptersResponse(
            adapters=[
                admin_pb2.WorkerAdapter(worker_id=me, adapter=adapter_to_proto(each))
                for each in self._worker.load().adapters
                if not each.retired
            ]
        )

    async def ExplainRoute(
        self, request: admin_pb2.ExplainRouteRequest, context: _Context
    ) -> admin_pb2.ExplainRouteResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a worker routes nothing; ask a router")

    async def ListCachedBlocks(
        self, request: admin_pb2.ListCachedBlocksRequest, context: _Context
    ) -> admin_pb2.ListCachedBlocksResponse:
        keys, seq = self._worker.cached_keys()
        return admin_pb2.ListCachedBlocksResponse(keys=keys, seq=seq)

    async def LookUpPrefix(
        self, request: admin_pb2.LookUpPrefixRequest, context: _Context
    ) -> admin_pb2.LookUpPrefixResponse:
        self._check_is_me(request.worker_id)
        prefix = self._prefix(request)
        holding = holding_to_proto(self._me, await self._prefixes.look_up(prefix))
        return admin_pb2.LookUpPrefixResponse(num_prompt_tokens=len(prefix.token_ids), workers=[holding])

    async def PinPrefix(self, request: admin_pb2.PinPrefixRequest, context: _Context) -> admin_pb2.PinPrefixResponse:
        self._check_is_me(request.worker_id)
        check_ttl(request.ttl_seconds)
        holding = await self._prefixes.pin(self._prefix(request), request.ttl_seconds)
        return admin_pb2.PinPrefixResponse(workers=[holding_to_proto(self._me, holding)])

    async def ClearPrefix(
        self, request: admin_pb2.ClearPrefixRequest, context: _Context
    ) -> admin_pb2.ClearPrefixResponse:
        self._check_is_me(request.worker_id)
        what = request.WhichOneof("what")
        if request.moved and what != "request":
            raise InvalidArgument("moved", True, "must be false without request: only a prompt's blocks move")
        if what == "request" and request.moved:
            num_blocks = await self._prefixes.remove_moved(self._prefix(request), request.first_block)
        elif what == "request":
            num_blocks = await self._prefixes.clear(self._prefix(request), request.first_block)
        elif what == "cache_salt":
            check_salt("cache_salt", request.cache_salt)
            num_blocks = await self._prefixes.clear_tenant(request.cache_salt)
        elif what == "adapter_name":
            check_adapter_name(request.adapter_name)
            num_blocks = await self._prefixes.clear_adapter(request.adapter_name)
        else:
            limit = "must be request, cache_salt or adapter_name; ResetPrefixCache forgets everything"
            raise InvalidArgument("what", None, limit)
        return admin_pb2.ClearPrefixResponse(num_blocks=num_blocks)

    async def MovePrefix(self, request: admin_pb2.MovePrefixRequest, context: _Context) -> admin_pb2.MovePrefixResponse:
        self._check_is_me(request.to_worker_id, "to_worker_id")
        if request.remove:
            raise InvalidArgument("remove", True, "must be false on a worker; a router removes it where it was")
        moved = await self._prefixes.bring(self._prefix(request), move_sources_from_proto(request))
        return admin_pb2.MovePrefixResponse(num_blocks=moved.num_blocks, num_moved_blocks=moved.num_moved_blocks)

    @property
    def _me(self) -> str:
        return self._worker.description.worker_id

    def _prefix(self, message: _AboutPrefix) -> Prefix:
        worker = self._worker.description
        request, adapter = message.request, None
        name = request.adapter or (request.model if request.model != worker.model else "")
        if message.HasField("adapter"):
            adapter = label_from_proto(message.adapter)
        elif name:
            loaded = {each.label.name: each.label for each in self._worker.load().adapters if not each.retired}
            if (adapter := loaded.get(name)) is None:
                raise NotFound(f"adapter {name[:200]!r} is not loaded here", reason=ADAPTER_NOT_FOUND)
        return prefix_of(request, worker.fingerprint.block_size, worker.vocab_size, adapter)

    def _check_is_me(self, worker_id: str, field: str = "worker_id") -> None:
        if worker_id not in ("", self._me):
            raise InvalidArgument(field, worker_id, f"must be empty or {self._me!r}, the worker that answers")
