"""AdminService of the router: it answers for the workers it knows, by asking them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import grpc

from kvstore.index import PrefixIndex
from pagewire.errors import FailedPrecondition, NotFound, Unavailable, from_rpc_error
from pagewire.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from pagewire.worker_rpc import new_generation
from pagewire.worker_view import AdapterLabel, WorkerRole
from pagewire.worker_view_wire import adapter_to_proto, info_to_proto, label_from_proto, load_to_proto, queue_to_proto
from router.adapter_keeper import LOAD_SECONDS, AdapterKeeper
from router.adapter_load import load_everywhere
from router.explanation import Explanation
from router.fleet import Fleet, FleetWorker
from router.pipeline import Pipeline
from router.prefix_admin import ACTION_SECONDS, PrefixAdmin, ask
from router.service import call_from_proto

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
# A worker that is slower is shown as the fleet last saw it.
_STATUS_SECONDS = 1.0
# Workers tell within 100 ms; who is silent longer is about to be lost.
_MOST_LOOKS, _LOOK_SECONDS = 100, 0.02
_ROLES: dict[WorkerRole, types_pb2.WorkerRole.ValueType] = {
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
}


class RouterAdminServicer(PrefixAdmin):
    """`on_drain` is called when the router itself is told to drain."""

    def __init__(
        self,
        pipeline: Pipeline,
        fleet: Fleet,
        index: PrefixIndex | None,
        *,
        on_drain: Callable[[], None],
        keeper: AdapterKeeper | None = None,
    ) -> None:
        super().__init__(pipeline, fleet)
        self._keeper = keeper
        self._loading: set[asyncio.Task[admin_pb2.LoadAdapterResponse]] = set()
        self._index = index
        self._on_drain = on_drain

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: _Context) -> admin_pb2.GetStatusResponse:
        workers = [worker for _, worker in sorted(self._fleet.workers().items())]
        return admin_pb2.GetStatusResponse(
            process="router",
            version=version("pagewire"),
            workers=await asyncio.gather(*(_status(worker) for worker in workers)),
            num_requests=self._pipeline.num_active,
            index_state="off" if self._index is None else self._index.state,
            num_indexed_blocks=0 if self._index is None else self._index.num_blocks,
            draining=self._pipeline.draining,
            tenants=[queue_to_proto(queue) for queue in self._pipeline.by_tenant()],
        )

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        message = admin_pb2.ResetPrefixCacheRequest()
        answers = await ask(
            self.addressed(request.worker_id),
            lambda stub: stub.ResetPrefixCache(message, timeout=ACTION_SECONDS),
        )
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=sum(answer.num_blocks for answer in answers))

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        if request.worker_id:
            message = admin_pb2.DrainRequest()
            answers = await ask(
                self.addressed(request.worker_id), lambda stub: stub.Drain(message, timeout=ACTION_SECONDS)
            )
            return admin_pb2.DrainResponse(num_requests=answers[0].num_requests)
        self._pipeline.start_drain()
        self._on_drain()
        return admin_pb2.DrainResponse(num_requests=self._pipeline.num_active)

    async def ListCachedBlocks(
        self, request: admin_pb2.ListCachedBlocksRequest, context: _Context
    ) -> admin_pb2.ListCachedBlocksResponse:
        """The union over the workers; it has no sequence number."""
        message = admin_pb2.ListCachedBlocksRequest()
        answers = await ask(self.addressed(""), lambda stub: stub.ListCachedBlocks(message, timeout=ACTION_SECONDS))
        return admin_pb2.ListCachedBlocksResponse(keys=sorted({key for answer in answers for key in answer.keys}))

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: _Context
    ) -> admin_pb2.LoadAdapterResponse:
        """All live workers say first whether they can serve it: if one can't, nothing has changed."""
        workers = self.addressed("")
        if not workers:
            raise Unavailable("no worker is alive to load an adapter")
        message = admin_pb2.LoadAdapterRequest(name=request.name, path=request.path, check_only=True)
        message.generation = request.generation or new_generation()
        answers = await ask(workers, lambda stub: stub.LoadAdapter(message, timeout=LOAD_SECONDS))
        message.digest = _same_digest(workers, answers, request)
        if request.check_only:
            return admin_pb2.LoadAdapterResponse(adapter=answers[0].adapter)
        message.check_only = False  # whose content has changed since refuses
        loading = asyncio.create_task(load_everywhere(workers, message, LOAD_SECONDS), name=f"load {request.name}")
        self._loading.add(loading)  # to its end, also if the caller goes away: nothing half-made is left
        loading.add_done_callback(self._loaded)
        answer = await asyncio.shield(loading)
        label = label_from_proto(answer.adapter.ref)
        await self._until_seen(lambda adapters: label in adapters)
        return answer

    def _loaded(self, loading: asyncio.Task[admin_pb2.LoadAdapterResponse]) -> None:
        self._loading.discard(loading)
        if not loading.cancelled() and (error := loading.exception()) is not None:
            logger.warning("%s", error)  # who asked may be gone

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: _Context
    ) -> admin_pb2.UnloadAdapterResponse:
        """From every live worker that has it; workers that start later won't get it."""
        was_kept = self._keeper is not None and self._keeper.forget(request.name)
        answers = await asyncio.gather(
            *(_unload(worker, request) for worker in self.addressed("")), return_exceptions=True
        )
        done = [answer for answer in answers if isinstance(answer, admin_pb2.UnloadAdapterResponse)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        serious = [each for each in failures if not isinstance(each, NotFound)]
        if serious or not (done or was_kept):
            raise (serious or failures or [NotFound(f"adapter {request.name!r} is not loaded: no worker is alive")])[0]
        await self._until_seen(lambda adapters: all(label.name != request.name for label in adapters))
        return admin_pb2.UnloadAdapterResponse(num_workers=sum(answer.num_workers for answer in done))

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: _Context
    ) -> admin_pb2.ListAdaptersResponse:
        """As the fleet saw them last."""
        return admin_pb2.ListAdaptersResponse(
            adapters=[
                admin_pb2.WorkerAdapter(worker_id=worker.description.worker_id, adapter=adapter_to_proto(each))
                for _, worker in sorted(self._fleet.workers().items())
                if worker.alive
                for each in worker.load.adapters
                if not each.retired
            ]
        )

    async def ExplainRoute(
        self, request: admin_pb2.ExplainRouteRequest, context: _Context
    ) -> admin_pb2.ExplainRouteResponse:
        call = call_from_proto(request.request, {"x-session-id": request.session_id})
        return explanation_to_proto(await self._pipeline.explain(call))

    async def _until_seen(self, is_so: Callable[[set[AdapterLabel]], bool]) -> None:
        """Until the fleet's view of every live worker is so: then this router's next request goes by it."""
        for _ in range(_MOST_LOOKS):
            if all(
                is_so({each.label for each in worker.load.adapters if not each.retired})
                for worker in self.addressed("")
            ):
                return
            await asyncio.sleep(_LOOK_SECONDS)


def explanation_to_proto(explanation: Explanation) -> admin_pb2.ExplainRouteResponse:
    """Field by field."""
    return admin_pb2.ExplainRouteResponse(
        num_prompt_tokens=explanation.num_prompt_tokens,
        policy=explanation.policy,
        prefill_worker=explanation.prefill_worker,
        decode_worker=explanation.decode_worker,
        reason=explanation.reason,
        workers=[
            admin_pb2.WorkerScore(
                worker_id=each.worker_id,
                role=_ROLES[each.role],
                num_hit_blocks=each.num_hit_blocks,
                num_indexed_blocks=each.num_indexed_blocks,
                obstacle=each.obstacle,
                cost=each.cost,
                parts=each.parts,
            )
            for each in explanation.verdicts
        ],
    )


def _same_digest(
    workers: Sequence[FleetWorker],
    answers: Sequence[admin_pb2.LoadAdapterResponse],
    request: admin_pb2.LoadAdapterRequest,
) -> bytes:
    """Raises FailedPrecondition unless all have the same content there."""
    digests = {
        worker.description.worker_id: answer.adapter.ref.digest for worker, answer in zip(workers, answers, strict=True)
    }
    digest = request.digest or answers[0].adapter.ref.digest
    if set(digests.values()) != {digest}:
        found = ", ".join(f"{worker_id}: {each.hex()[:16]}" for worker_id, each in sorted(digests.items()))
        raise FailedPrecondition(
            f"path {request.path[:200]!r}: is not the same adapter for all workers; its digest is {found}",
            reason="ADAPTER_DIFFERS",
        )
    return digest


async def _unload(worker: FleetWorker, message: admin_pb2.UnloadAdapterRequest) -> admin_pb2.UnloadAdapterResponse:
    answers = await ask([worker], lambda stub: stub.UnloadAdapter(message, timeout=ACTION_SECONDS))
    answer: admin_pb2.UnloadAdapterResponse = answers[0]
    return answer


async def _status(worker: FleetWorker) -> admin_pb2.WorkerStatus:
    """The worker's own words if it answers, else what the fleet saw last."""
    seen = admin_pb2.WorkerStatus(
        info=info_to_proto(worker.description), load=load_to_proto(worker.load), alive=worker.alive
    )
    if not worker.alive:
        return seen
    stub = admin_pb2_grpc.AdminServiceStub(worker.channel)
    try:
        answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_STATUS_SECONDS)
    except grpc.RpcError as error:
        logger.info("worker %s gave no status: %s", worker.description.worker_id, from_rpc_error(error).message)
        return seen
    for status in answer.workers:
        if status.info.incarnation == worker.description.incarnation:
            status.alive = True
            return status
    return seen
