"""PrefillService: between protobuf and the worker. Nothing is decided here."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from engine.request import ChoiceState, EngineRequest, PromptLogprobs
from pagewire.v1 import prefill_pb2, prefill_pb2_grpc
from pagewire.worker_wire import job_from_proto, prompt_logprobs_to_proto, token_to_proto
from prefill_svc.stream import Progress
from prefill_svc.worker import PrefillWorker

_Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Served to routers."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: _Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        job = job_from_proto(request.request, self._worker.description)
        engine_request = EngineRequest(
            request_id=job.request_id,
            prompt_token_ids=job.prompt_token_ids,
            params=job.params,
            cache_salt=job.cache_salt,
            choices=tuple(ChoiceState(c.choice, c.output_token_ids, c.finished) for c in job.choices),
            prefill_only=True,
            priority=job.priority,
            tenant=job.tenant,
            trace_id=job.trace_id,
            ids_are_checked=True,
            adapter=self._worker.adapters.find(job.adapter),
        )
        stream = self._worker.prefill(
            engine_request,
            hand_off=request.hand_off,
            sources=job.prefix_sources,
            router_id=request.router_id,
            num_expected_tokens=job.num_expected_tokens,
        )
        try:
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(ticket=stream.ticket))
            async with aclosing(stream.events()) as events:
                async for event in events:
                    if isinstance(event, Progress):
                        yield prefill_pb2.PrefillResponse(
                            progress=prefill_pb2.PrefillProgress(
                                num_computed_tokens=event.num_computed_tokens,
                                num_cached_tokens=event.num_cached_tokens,
                            )
                        )
                    elif isinstance(event, PromptLogprobs):
                        yield prefill_pb2.PrefillResponse(prompt_logprobs=prompt_logprobs_to_proto(event))
                    else:
                        yield prefill_pb2.PrefillResponse(
                            first_tokens=prefill_pb2.FirstTokens(
                                tokens=[token_to_proto(token) for token in event.tokens],
                                num_cached_tokens=event.num_cached_tokens,
                            )
                        )
        finally:
            self._worker.cancel(stream)

    async def ReleaseTicket(
        self, request: prefill_pb2.ReleaseTicketRequest, context: _Context
    ) -> prefill_pb2.ReleaseTicketResponse:
        if request.ticket:
            released = self._worker.release_ticket(request.ticket)
        else:
            released = self._worker.release_request(request.request_id)
        return prefill_pb2.ReleaseTicketResponse(released=released)
