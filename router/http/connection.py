"""Work that ends with its client: whoever hangs up cancels what runs for them."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """The connection broke before the answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; when the client goes first, cancels it and raises ClientGone. The body must have been read."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work, name="http-answer")
    watching = loop.create_task(_gone(receive), name="http-watch")
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = working.done()
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not finished:
        raise ClientGone
    working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
