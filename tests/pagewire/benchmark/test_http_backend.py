"""The HTTP backend against a socket that says what a test wants: ends of lines, odd statuses, URLs that are none."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagewire.benchmark.backend import SendError
from pagewire.benchmark.datasets import Sample
from pagewire.benchmark.http_backend import HttpBackend
from pagewire.config import ConfigError

SAMPLE = Sample("hello", 4)


@asynccontextmanager
async def answering(head: str, pieces: Sequence[bytes]) -> AsyncIterator[HttpBackend]:
    """A backend whose server answers every request with the same bytes and closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        length = int(asked.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(f"{head}\r\nconnection: close\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)  # so that they come one by one; any other cut is as good
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    backend = HttpBackend(f"http://127.0.0.1:{port}", "/v1/completions", "m", {})
    try:
        yield backend
    finally:
        await backend.close()
        server.close()
        await server.wait_closed()


def event(**content: Any) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}".encode()


async def text_of(backend: HttpBackend) -> str:
    return "".join([delta.text async for delta in backend.stream(SAMPLE, "r")])


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_other_ends_of_lines_belong_to_the_text(end: bytes) -> None:
    said = "a\u2028b\u2029c\u0085d\x1ee"
    body = b": a comment" + end + event(choices=[{"text": said}]) + end + b"data: [DONE]" + end
    cut = body.index(b"\xe2\x80\xa8") + 1  # in the middle of a character
    async with answering("HTTP/1.1 200 OK", [body[:cut], body[cut:]]) as backend:
        assert await text_of(backend) == said


async def test_the_last_line_may_lack_its_end() -> None:
    async with answering("HTTP/1.1 200 OK", [event(choices=[{"text": "a"}]) + b"\n\ndata: [DONE]"]) as backend:
        assert await text_of(backend) == "a"
    async with answering("HTTP/1.1 200 OK", [event(choices=[{"text": "a"}]) + b"\n\ndata: [DO"]) as backend:
        with pytest.raises(SendError, match=r"ended before \[DONE\]"):
            await text_of(backend)


@pytest.mark.parametrize(
    ("head", "message"),
    [("HTTP/1.1 529 Site is overloaded", "Site is overloaded"), ("HTTP/1.1 529 ", "no reason given")],
)
async def test_a_status_that_python_does_not_know(head: str, message: str) -> None:
    async with answering(head, []) as backend:
        with pytest.raises(SendError) as raised:
            await text_of(backend)
    assert (raised.value.code, raised.value.message) == ("HTTP 529", message)


async def test_urls_that_are_none() -> None:
    for url in ("http://[zz]", "http://host:port"):
        with pytest.raises(ConfigError, match="base-url = http"):
            HttpBackend(url, "/v1/completions", "m", {})
    backend = HttpBackend("127.0.0.1", "/v1/completions", "m", {})
    with pytest.raises(SendError, match="/v1/models: "):
        await backend.open()
    await backend.close()
