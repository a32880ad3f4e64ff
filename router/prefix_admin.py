"""The router's half of an operator's hand on cached prefixes: text to tokens, then the workers are asked."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.errors import FailedPrecondition, InvalidArgument, NotFound, from_rpc_error
from pagewire.prefix_control import check_adapter_name, check_salt, check_ttl
from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, types_pb2
from pagewire.worker_view import PrefixSource
from pagewire.worker_view_wire import label_to_proto, prefix_source_to_proto
from router.fleet import Fleet, FleetWorker
from router.pipeline import Pipeline
from router.service import call_from_proto

_Context = grpc.aio.ServicerContext[Any, Any]
ACTION_SECONDS = 10.0
_MOVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What workers are asked about."""

    request: inference_pb2.GenerateRequest
    adapter: types_pb2.AdapterRef | None


class PrefixAdmin(admin_pb2_grpc.AdminServiceServicer):
    """LookUpPrefix, PinPrefix, ClearPrefix and MovePrefix on a router."""

    def __init__(self, pipeline: Pipeline, fleet: Fleet) -> None:
        self._pipeline = pipeline
        self._fleet = fleet

    async def LookUpPrefix(
        self, request: admin_pb2.LookUpPrefixRequest, context: _Context
    ) -> admin_pb2.LookUpPrefixResponse:
        tokens = await self._tokens(request.request)
        return admin_pb2.LookUpPrefixResponse(
            num_prompt_tokens=len(tokens.request.tokens.token_ids),
            workers=await self._look_up(self.addressed(request.worker_id), tokens),
        )

    async def PinPrefix(self, request: admin_pb2.PinPrefixRequest, context: _Context) -> admin_pb2.PinPrefixResponse:
        check_ttl(request.ttl_seconds)
        workers = self.addressed(request.worker_id)
        tokens = await self._tokens(request.request)
        if not request.worker_id:
            held = await self._look_up(workers, tokens)
            ids = {each.worker_id for each in held if any((each.num_pinned_blocks or each.num_blocks).values())}
            workers = [worker for worker in workers if worker.description.worker_id in ids]
            if not workers and request.ttl_seconds:
                raise NotFound("no live worker has anything of the prompt", reason="PREFIX_NOT_CACHED")
        message = admin_pb2.PinPrefixRequest(
            request=tokens.request, adapter=tokens.adapter, ttl_seconds=request.ttl_seconds
        )
        answers = await ask(workers, lambda stub: stub.PinPrefix(message, timeout=ACTION_SECONDS))
        return admin_pb2.PinPrefixResponse(workers=[holding for answer in answers for holding in answer.workers])

    async def ClearPrefix(
        self, request: admin_pb2.ClearPrefixRequest, context: _Context
    ) -> admin_pb2.ClearPrefixResponse:
        if request.moved:
            raise InvalidArgument(
                "moved", True, "must be false on a router; MovePrefix with remove says it to a worker"
            )
        message = admin_pb2.ClearPrefixRequest(first_block=request.first_block)
        what = request.WhichOneof("what")
        if what == "request":
            tokens = await self._tokens(request.request)
            message.MergeFrom(admin_pb2.ClearPrefixRequest(request=tokens.request, adapter=tokens.adapter))
        elif what == "cache_salt":
            check_salt("cache_salt", request.cache_salt)
            message.cache_salt = request.cache_salt
        elif what == "adapter_name":
            check_adapter_name(request.adapter_name)
            message.adapter_name = request.adapter_name
        else:
            limit = "must be request, cache_salt or adapter_name; ResetPrefixCache forgets everything"
            raise InvalidArgument("what", None, limit)
        answers = await ask(
            self.addressed(request.worker_id), lambda stub: stub.ClearPrefix(message, timeout=ACTION_SECONDS)
        )
        return admin_pb2.ClearPrefixResponse(num_blocks=sum(answer.num_blocks for answer in answers))

    async def MovePrefix(self, request: admin_pb2.MovePrefixRequest, context: _Context) -> admin_pb2.MovePrefixResponse:
        if not request.to_worker_id:
            raise InvalidArgument("to_worker_id", "", "must name a worker")
        if request.to_worker_id == request.from_worker_id:
            raise InvalidArgument("from_worker_id", request.from_worker_id, "must differ from to_worker_id")
        (target,) = self.addressed(request.to_worker_id)
        tokens = await self._tokens(request.request)
        source, hint = await self._source(request.from_worker_id, target, tokens)
        message = admin_pb2.MovePrefixRequest(
            request=tokens.request, adapter=tokens.adapter, sources=[prefix_source_to_proto(hint)]
        )
        (moved,) = await ask([target], lambda stub: stub.MovePrefix(message, timeout=_MOVE_SECONDS))
        response = admin_pb2.MovePrefixResponse(num_blocks=moved.num_blocks, num_moved_blocks=moved.num_moved_blocks)
        if request.remove and moved.num_blocks >= hint.num_blocks:
            clear = admin_pb2.ClearPrefixRequest(
                request=tokens.request, adapter=tokens.adapter, first_block=hint.num_blocks - 1, moved=True
            )
            (cleared,) = await ask([source], lambda stub: stub.ClearPrefix(clear, timeout=ACTION_SECONDS))
            response.num_removed_blocks = cleared.num_blocks
        return response

    async def _source(self, worker_id: str, target: FleetWorker, tokens: _Tokens) -> tuple[FleetWorker, PrefixSource]:
        """Who is to give it, and what that one has: the longest, of equals who has most of it on the device."""
        others = [each for each in self.addressed(worker_id) if each.description.worker_id != _id(target)]
        fit = [each for each in others if each.description.fingerprint == target.description.fingerprint]
        if worker_id and not fit:
            raise FailedPrecondition(
                f"worker {worker_id!r} has {others[0].description.fingerprint}, {_id(target)!r} has "
                f"{target.description.fingerprint}: KV cannot move between them",
                reason="FINGERPRINT_MISMATCH",
            )
        held = {each.worker_id: each.num_blocks for each in await self._look_up(fit, tokens)}
        # Each tier is prefix-closed, and has what it has from the first block on.
        depths = {_id(each): max(held.get(_id(each), {}).values(), default=0) for each in fit}
        best = max(fit, key=lambda each: (depths[_id(each)], held[_id(each)].get("device", 0)), default=None)
        if best is None or not depths[_id(best)]:
            where = repr(worker_id) if worker_id else "any other worker"
            raise NotFound(f"nothing of the prompt is cached by {where}", reason="PREFIX_NOT_CACHED")
        from_, num_blocks = best.description, depths[_id(best)]
        num_lower = num_blocks - held[_id(best)].get("device", 0)
        return best, PrefixSource(from_.endpoint, from_.worker_id, from_.incarnation, num_blocks, from_.role, num_lower)

    async def _tokens(self, request: inference_pb2.GenerateRequest) -> _Tokens:
        """The prompt as workers take it, and the load of the adapter that it names."""
        call = await self._pipeline.resolve(call_from_proto(request, {}))
        tokens = inference_pb2.TokenPrompt(token_ids=call.prompt_token_ids)
        prompt = inference_pb2.GenerateRequest(tokens=tokens, cache_salt=request.cache_salt)
        return _Tokens(prompt, None if call.adapter is None else label_to_proto(call.adapter))

    async def _look_up(self, workers: Sequence[FleetWorker], tokens: _Tokens) -> list[admin_pb2.PrefixHolding]:
        message = admin_pb2.LookUpPrefixRequest(request=tokens.request, adapter=tokens.adapter)
        answers = await ask(workers, lambda stub: stub.LookUpPrefix(message, timeout=ACTION_SECONDS))
        return [holding for answer in answers for holding in answer.workers]

    def addressed(self, worker_id: str) -> list[FleetWorker]:
        """The named live worker, or all live ones."""
        alive = {name: worker for name, worker in self._fleet.workers().items() if worker.alive}
        if not worker_id:
            return list(alive.values())
        if worker_id not in alive:
            known = ", ".join(sorted(alive)) or "none"
            raise NotFound(f"worker {worker_id!r} is not alive; live workers: {known}", reason="WORKER_NOT_FOUND")
        return [alive[worker_id]]


def _id(worker: FleetWorker) -> str:
    return worker.description.worker_id


async def ask(workers: Sequence[FleetWorker], question: Callable[[Any], Any]) -> list[Any]:
    """Asks all at once; the first error is passed on. (The stub's type is that of the sync API.)"""
    try:
        return await asyncio.gather(*(question(admin_pb2_grpc.AdminServiceStub(worker.channel)) for worker in workers))
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
