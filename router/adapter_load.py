"""A load on several workers: on all of them, or on none."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from pagewire.errors import FailedPrecondition, PagewireError, from_rpc_error
from pagewire.v1 import admin_pb2
from pagewire.worker_view import AdapterLabel
from router.fleet import FleetWorker
from router.prefix_admin import ACTION_SECONDS, ask


async def load_everywhere(
    workers: Sequence[FleetWorker], message: admin_pb2.LoadAdapterRequest, timeout: float
) -> admin_pb2.LoadAdapterResponse:
    """The first worker's answer. Raises FailedPrecondition if one fails: then it is taken back from all.

    Also from those that failed: who did not answer may still be at it. Not from those that had this very load before.
    """
    answers = await asyncio.gather(
        *(ask([worker], lambda stub: stub.LoadAdapter(message, timeout=timeout)) for worker in workers),
        return_exceptions=True,
    )
    outcomes = {_id(worker): each for worker, each in zip(workers, answers, strict=True)}
    failed = {worker_id: each for worker_id, each in outcomes.items() if isinstance(each, BaseException)}
    if not failed:
        answer: admin_pb2.LoadAdapterResponse = answers[0][0]  # type: ignore[index]
        return answer
    new = [worker for worker in workers if not _has(worker, message)]
    undo = admin_pb2.UnloadAdapterRequest(name=message.name, generation=message.generation)
    undone = await asyncio.gather(
        *(ask([worker], lambda stub: stub.UnloadAdapter(undo, timeout=ACTION_SECONDS)) for worker in new),
        return_exceptions=True,
    )
    taken_back = [_id(worker) for worker, each in zip(new, undone, strict=True) if _had_it(each)]
    in_doubt = [_id(worker) for worker, each in zip(new, undone, strict=True) if isinstance(each, BaseException)]
    reasons = "; ".join(f"worker {worker_id} has failed ({_reason(error)})" for worker_id, error in failed.items())
    raise FailedPrecondition(
        f"adapter {message.name!r} was not loaded: {reasons}; it was taken back from: {_listed(taken_back)}"
        + (f"; no answer to that from: {_listed(in_doubt)}" if in_doubt else ""),
        reason="ADAPTER_LOAD_TAKEN_BACK",
        metadata={"adapter": message.name},
    )


def _has(worker: FleetWorker, message: admin_pb2.LoadAdapterRequest) -> bool:
    """As the fleet saw it before the load."""
    label = AdapterLabel(message.name, message.digest, message.generation)
    return any(view.label == label and not view.retired for view in worker.load.adapters)


def _had_it(answer: Any) -> bool:
    return not isinstance(answer, BaseException) and bool(answer[0].num_workers)


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.RpcError):
        error = from_rpc_error(error)
    return f"{error.code.name}: {error.message}" if isinstance(error, PagewireError) else repr(error)


def _id(worker: FleetWorker) -> str:
    return worker.description.worker_id


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)) or "none"
