"""Client of PrefillService: one prefill from admission to the first tokens, and giving up a ticket."""

import asyncio
import logging
from typing import Protocol

import grpc

from pagewire.errors import Internal, PagewireError, Unavailable, from_rpc_error
from pagewire.trace import log_fields, new_error_id, trace_id
from pagewire.v1 import prefill_pb2, prefill_pb2_grpc
from router.identity import ROUTER_ID
from router.request import Logprobs, Token, WorkerCall
from router.worker_wire import logprobs, token, worker_request

logger = logging.getLogger(__name__)

_Stream = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]

_RELEASE_SECONDS = 5.0
_END_SECONDS = 5.0


class PrefillListener(Protocol):
    """Who is told of a prefill's course. Plain calls on the event loop."""

    def prefill_accepted(self, ticket: bytes) -> None:
        """Admitted; the ticket is empty without hand-off."""
        ...

    def prefill_token(self, token: Token) -> None:
        """The first token of a choice."""
        ...

    def prefill_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        """Those of the prompt's tokens from `start` on."""
        ...

    def prefill_done(self, num_cached_tokens: int) -> None:
        """All first tokens were delivered."""
        ...

    def prefill_failed(self, error: PagewireError) -> None:
        """The worker refused, failed or was lost; nothing follows."""
        ...


async def prefill(channel: grpc.aio.Channel, call: WorkerCall, listener: PrefillListener, *, hand_off: bool) -> None:
    """Runs one Prefill stream. Never raises but for cancellation, which aborts the prefill on the worker.

    Its deadline is `call.seconds_left`: should this router vanish, the worker ends it by itself.
    """
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    try:
        request = prefill_pb2.PrefillRequest(request=worker_request(call), hand_off=hand_off, router_id=ROUTER_ID)
        stream = stub.Prefill(request, timeout=call.seconds_left)
        try:
            await _read(stream, listener)
        finally:
            stream.cancel()
    except grpc.RpcError as error:
        listener.prefill_failed(from_rpc_error(error))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled us: grpc.aio says so when the channel is closed under a call …
        listener.prefill_failed(Unavailable("the channel to the prefill worker was closed"))
    except grpc.aio.UsageError as error:
        # … and this when it was closed before.
        listener.prefill_failed(Unavailable(f"the channel to the prefill worker is of no use: {error}"))
    except Exception as bug:
        # The request must hear of it: nobody else waits for this task.
        error_id = new_error_id()
        fields = log_fields(call.request_id, trace_id(call.traceparent), error_id=error_id)
        logger.exception("request %s: its prefill could not be followed", call.request_id, extra=fields)
        message = f"internal error {error_id} ({type(bug).__name__}); the router's log has the traceback"
        listener.prefill_failed(Internal(message, error_id=error_id))


async def _read(stream: _Stream, listener: PrefillListener) -> None:
    async for response in stream:
        if response.HasField("accepted"):
            listener.prefill_accepted(response.accepted.ticket)
        elif response.HasField("prompt_logprobs"):
            found = response.prompt_logprobs
            listener.prefill_prompt_logprobs(found.start, [logprobs(entry) for entry in found.entries])
        elif response.HasField("first_tokens"):
            for message in response.first_tokens.tokens:
                listener.prefill_token(token(message))
            listener.prefill_done(response.first_tokens.num_cached_tokens)
            await _end_of(stream)
            return
    listener.prefill_failed(Unavailable("the prefill worker ended the stream before the first token"))


async def _end_of(stream: _Stream) -> None:
    """Lets the worker end the stream: cancelled before that, it would take the blocks for unwanted."""
    try:
        async with asyncio.timeout(_END_SECONDS):
            await stream.code()
    except TimeoutError:
        logger.warning("a prefill worker does not end its stream after the first tokens")


async def release_ticket(channel: grpc.aio.Channel, ticket: bytes, request_id: str = "") -> bool:
    """True if the worker gave something up. A worker that cannot be reached frees the ticket by its lease.

    An empty ticket means that of the prefill with this request id, which ended before the ticket was seen here.
    """
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    request = prefill_pb2.ReleaseTicketRequest(ticket=ticket, request_id=request_id)
    try:
        response = await stub.ReleaseTicket(request, timeout=_RELEASE_SECONDS)
    except grpc.RpcError as error:
        logger.info("ticket not released, its lease will end it: %s", from_rpc_error(error))
        return False
    except grpc.aio.UsageError as error:
        logger.info("ticket not released, the channel to its worker was closed: %s", error)
        return False
    return bool(response.released)
