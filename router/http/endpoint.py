"""The one seam around every endpoint: checks the token, turns exceptions into answers, counts and times."""

import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.errors import PagewireError
from pagewire.grants import INFERENCE
from pagewire.interceptor import RpcObserver
from pagewire.security import Security
from router.http.connection import ClientGone
from router.http.errors import Refusal, error_response, known_error

Handler = Callable[[Request], Awaitable[ASGIApp]]


class Endpoint:
    """An ASGI app of one handler. `name` is its label in metrics ("POST /v1/completions")."""

    def __init__(
        self, name: str, handler: Handler, security: Security | None = None, observe: RpcObserver | None = None
    ) -> None:
        self._name = name
        self._handler = handler
        self._security = security
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        has_begun = False
        code = "CANCELLED"

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._authorize(scope)
            answer = await self._handler(Request(scope, receive))
            await answer(scope, receive, watched_send)
            code = "OK"
        except ClientGone:
            pass  # nobody is left to be told
        except Exception as error:
            # A stream that broke has told its client and the log.
            if not (has_begun and isinstance(error, PagewireError)):
                error = known_error(error, self._name)
            code = error.code.name if isinstance(error, PagewireError) else "INVALID_ARGUMENT"
            if not has_begun and isinstance(error, PagewireError | Refusal):
                await error_response(error)(scope, receive, send)
        finally:
            if self._observe is not None:
                self._observe(self._name, code, time.monotonic() - started)

    async def _authorize(self, scope: Scope) -> None:
        if self._security is not None:
            header = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
            await self._security.authorize(header.decode("latin-1"), self._name, INFERENCE)
