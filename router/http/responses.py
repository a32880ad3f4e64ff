"""The two kinds of answer, both given up when the client goes: one JSON object, or a stream of events (SSE)."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.connection import while_connected
from router.http.errors import error_body, known_error

Json = dict[str, object]

_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Or nginx would collect the events.
    "x-accel-buffering": "no",
}


class JsonAnswer:
    """Sends what `answer` comes to."""

    def __init__(self, answer: Callable[[], Awaitable[Json]], headers: Mapping[str, str]) -> None:
        self._answer = answer
        self._headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            content = to_json(await self._answer())
            await Response(content, headers=self._headers, media_type="application/json")(scope, receive, send)

        await while_connected(receive, work())


class EventAnswer:
    """Sends each object as an event and `[DONE]` at the end.

    Nothing is sent before the first event is there, so that an error until then has its HTTP status. A later error is
    an event of its own, and `[DONE]` does not follow.
    """

    def __init__(self, events: AsyncGenerator[Json], headers: Mapping[str, str]) -> None:
        self._events = events
        self._headers = {**_STREAM_HEADERS, **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            event = _event(to_json(await anext(events)))
            raw_headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
            await send({"type": "http.response.body", "body": event, "more_body": True})
            try:
                async for value in events:
                    await send({"type": "http.response.body", "body": _event(to_json(value)), "more_body": True})
            except Exception as error:
                known = known_error(error, str(scope["path"]))
                await send({"type": "http.response.body", "body": _event(to_json(error_body(known)))})
                raise known from error
            await send({"type": "http.response.body", "body": _event(b"[DONE]")})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
