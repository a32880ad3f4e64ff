"""DecodeService: between protobuf and the worker. Nothing is decided here."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from decode_svc.intake import Source
from decode_svc.outbox import Accepted, Batch, Outbox
from decode_svc.worker import DecodeWorker
from engine.request import ChoiceState, EngineRequest, PromptLogprobs, TokenOutput
from pagewire.errors import InvalidArgument, PagewireError
from pagewire.v1 import decode_pb2, decode_pb2_grpc
from pagewire.worker_wire import (
    Job,
    finish_to_proto,
    job_from_proto,
    logprobs_to_proto,
    prompt_logprobs_to_proto,
    token_to_proto,
)

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Served to routers (sessions) and to everybody else (single requests)."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self._sessions: set[Outbox] = set()

    def close_sessions(self) -> None:
        """Ends every session once what it has to say is said; the process is about to stop."""
        for outbox in self._sessions:
            outbox.close()

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: _Context
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        outbox = Outbox()
        running: dict[int, str] = {}
        reader = asyncio.create_task(self._read(requests, outbox, running), name="session-reader")
        self._sessions.add(outbox)
        try:
            while (batch := await outbox.take()) is not None:
                for handle in (*batch.ended, *(handle for handle, _ in batch.failures)):
                    running.pop(handle, None)
                if (response := _session_response(batch)) is not None:
                    yield response
                if reader.done() and not running:
                    break
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                raise error
        finally:
            self._sessions.discard(outbox)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            for request_id in running.values():
                self._worker.cancel(request_id)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: _Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        outbox = Outbox()
        engine_request, source, job = self._translate(request)
        self._worker.submit(
            engine_request,
            source,
            outbox,
            0,
            prefix_sources=job.prefix_sources,
            num_expected_tokens=job.num_expected_tokens,
            timeout=job.timeout_seconds,
        )
        try:
            async with aclosing(outbox.outputs()) as outputs:
                async for output in outputs:
                    yield _response(output)
        finally:
            self._worker.cancel(request.request.request_id)

    async def _read(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], outbox: Outbox, running: dict[int, str]
    ) -> None:
        """Starts and cancels. Ends when the router has said everything; what it started goes on."""
        try:
            async for message in requests:
                if message.HasField("start"):
                    self._start(message.start, outbox, running)
                elif message.HasField("cancel") and message.cancel.handle in running:
                    self._worker.cancel(running.pop(message.cancel.handle))
        except Exception:
            outbox.close()
            raise
        if not running:
            outbox.close()

    def _start(self, start: decode_pb2.SessionStart, outbox: Outbox, running: dict[int, str]) -> None:
        if start.handle in running:
            raise InvalidArgument("start.handle", start.handle, "must be unique on its session")
        try:
            request, source, job = self._translate(start.decode)
            self._worker.submit(
                request,
                source,
                outbox,
                start.handle,
                prefix_sources=job.prefix_sources,
                num_expected_tokens=job.num_expected_tokens,
                timeout=job.timeout_seconds,
            )
            running[start.handle] = request.request_id
        except PagewireError as error:
            outbox.fail(start.handle, error)
            outbox.flush()

    def _translate(self, message: decode_pb2.DecodeRequest) -> tuple[EngineRequest, Source | None, Job]:
        """The request, where its KV is, and what else the router said."""
        job = job_from_proto(message.request, self._worker.description)
        request = EngineRequest(
            request_id=job.request_id,
            prompt_token_ids=job.prompt_token_ids,
            params=job.params,
            cache_salt=job.cache_salt,
            choices=tuple(ChoiceState(c.choice, c.output_token_ids, c.finished) for c in job.choices),
            priority=job.priority,
            tenant=job.tenant,
            trace_id=job.trace_id,
            ids_are_checked=True,
            adapter=self._worker.adapters.find(job.adapter),
        )
        if not message.HasField("source"):
            return request, None, job
        source = message.source
        return request, Source(source.endpoint, source.worker_id, source.incarnation, source.ticket), job


def _response(output: Accepted | PromptLogprobs | TokenOutput) -> decode_pb2.DecodeResponse:
    if isinstance(output, Accepted):
        accepted = decode_pb2.DecodeAccepted(num_cached_tokens=output.num_cached_tokens)
        return decode_pb2.DecodeResponse(accepted=accepted)
    if isinstance(output, PromptLogprobs):
        return decode_pb2.DecodeResponse(prompt_logprobs=prompt_logprobs_to_proto(output))
    return decode_pb2.DecodeResponse(token=token_to_proto(output))


def _session_response(batch: Batch) -> decode_pb2.SessionResponse | None:
    """The batch as columns; None if a router needs to hear nothing of it (a request ended with its last token)."""
    if not (batch.accepted or batch.tokens or batch.failures or batch.prompt_logprobs):
        return None
    tokens = [token for _, token in batch.tokens]
    finished = any(token.finish_reason is not None for token in tokens)
    return decode_pb2.SessionResponse(
        handles=[handle for handle, _ in batch.tokens],
        choices=[token.choice for token in tokens],
        indexes=[token.index for token in tokens],
        token_ids=[token.token_id for token in tokens],
        finish_reasons=[finish_to_proto(token.finish_reason) for token in tokens] if finished else [],
        logprobs=[
            decode_pb2.SessionLogprobs(row=row, logprobs=logprobs_to_proto(token.logprobs))
            for row, token in enumerate(tokens)
            if token.logprobs is not None
        ],
        accepted=[
            decode_pb2.SessionAccepted(handle=handle, num_cached_tokens=num_cached_tokens)
            for handle, num_cached_tokens in batch.accepted
        ],
        failures=[
            decode_pb2.SessionFailure(
                handle=handle,
                code=error.code.value[0],
                message=error.message,
                status=error.to_status().SerializeToString(),
            )
            for handle, error in batch.failures
        ],
        prompt_logprobs=[
            decode_pb2.SessionPromptLogprobs(handle=handle, prompt_logprobs=prompt_logprobs_to_proto(found))
            for handle, found in batch.prompt_logprobs
        ],
    )
