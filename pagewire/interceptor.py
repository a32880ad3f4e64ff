"""The one server interceptor: checks the token, turns exceptions into statuses, counts and times each RPC."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pagewire.errors import Internal, InvalidArgument, PagewireError, abort
from pagewire.grants import AREAS_EVERYWHERE, area_of
from pagewire.security import AUTHORIZATION, Security
from pagewire.trace import new_error_id

logger = logging.getLogger(__name__)

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}

# (full method name, status code name, seconds)
RpcObserver = Callable[[str, str, float], None]
_Context = grpc.aio.ServicerContext[Any, Any]
_Behaviour = Callable[[Any, _Context], Awaitable[Any]]


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every asyncio handler.

    A PagewireError becomes its status with details; any other exception becomes INTERNAL with an id that the log has
    beside the traceback, and the process stays up. A handler that streams from an async generator has that generator
    closed before the RPC ends, also when the client is gone, so its `finally` runs at once and not when the garbage
    collector comes by.
    """

    def __init__(
        self, security: Security, observe: RpcObserver | None = None, areas: Mapping[str, str] = AREAS_EVERYWHERE
    ) -> None:
        self._security = security
        self._observe = observe
        self._areas = areas
        self._wrapped: dict[str, tuple[Any, Any]] = {}  # by method: the service's handler, and ours around it

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # Probes carry no token.
        if not method.startswith(_HEALTH_PREFIX):
            try:
                await self._authorize(handler_call_details)
            except PagewireError as error:
                # Stream-stream does not wait for a request, so it fits every kind of call.
                return grpc.stream_stream_rpc_method_handler(self._guard(_raise(error), method))
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = handler, self._wrap(handler, method)
        return known[1]

    async def _authorize(self, details: Any) -> None:
        header = next((value for key, value in details.invocation_metadata or () if key == AUTHORIZATION), "")
        method = details.method.removeprefix("/")
        area = area_of(method, self._areas)
        await self._security.authorize(header if isinstance(header, str) else "", method, area)

    def _wrap(self, handler: Any, method: str) -> Any:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if not (inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)):
            return handler
        parse = _parser(handler.request_deserializer)
        run = _as_coroutine(behaviour)
        make: Callable[..., Any]
        if handler.request_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.stream_unary_rpc_method_handler
            )
        else:
            make = (
                grpc.unary_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        if handler.request_streaming:
            # A bad message surfaces where the handler reads it, which is inside the guard.
            return make(self._guard(run, method), parse, handler.response_serializer)

        async def parse_and_run(data: bytes, context: _Context) -> Any:
            return await run(parse(data), context)

        return make(self._guard(parse_and_run, method), None, handler.response_serializer)

    def _guard(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        async def answer(request: Any, context: _Context) -> Any:
            started = time.monotonic()
            code = grpc.StatusCode.CANCELLED
            try:
                response = await behaviour(request, context)
                code = _code_of(context) or grpc.StatusCode.OK
                return response
            except PagewireError as error:
                code = error.code
                if code is grpc.StatusCode.INTERNAL:
                    logger.error("%s: %s", method, error.message)
                await abort(context, error)
            except grpc.aio.AbortError:
                code = _code_of(context) or grpc.StatusCode.UNKNOWN
                raise
            except grpc.aio.InternalError:
                raise
            except Exception as error:
                code = grpc.StatusCode.INTERNAL
                error_id = new_error_id()
                logger.exception("%s failed (error id %s)", method, error_id, extra={"error_id": error_id})
                # The text stays in the log: it may hold what is not the caller's business.
                message = f"internal error {error_id} ({type(error).__name__}); the server's log has the traceback"
                await abort(context, Internal(message, error_id=error_id))
            finally:
                if self._observe is not None:
                    self._observe(method, code.name, time.monotonic() - started)

        async def guarded(request: Any, context: _Context) -> Any:
            try:
                return await answer(request, context)
            except grpc.aio.InternalError as error:
                # A batch failed: the caller is gone, of which grpc.aio has not told us yet. There is nobody to tell.
                logger.debug("%s: the caller has gone: %s", method, error)
                raise asyncio.CancelledError from None

        return guarded


def _as_coroutine(behaviour: Callable[[Any, _Context], Any]) -> _Behaviour:
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour

    async def stream(request: Any, context: _Context) -> None:
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return stream


def _parser(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Bytes that are no message are the caller's fault; grpc would blame the server."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            limit = "must be a well-formed protobuf message whose strings are valid UTF-8"
            raise InvalidArgument("request", None, limit) from None

    return parse


def _code_of(context: _Context) -> grpc.StatusCode | None:
    """What the handler set by itself; grpc.aio gives a plain number before the RPC ends."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return _CODES.get(code)


def _raise(error: PagewireError) -> _Behaviour:
    async def refuse(request: Any, context: _Context) -> None:
        raise error

    return refuse
