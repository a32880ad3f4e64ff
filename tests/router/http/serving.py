"""OpenAI's API over scripted workers, on a real socket, with a client that sees status, headers and single events."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client import CollectorRegistry

from pagewire.config import RouterConfig
from pagewire.metrics import RpcMetrics
from pagewire.security import Security
from router.http.app import build_app
from router.http.server import HttpServer
from tests.router.scripted_workers import ScriptedDecode, ScriptedPrefill
from tests.router.system import PROMPT, System, a_system

PLAIN = Security()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Http:
    """What a test works with."""

    system: System
    server: HttpServer
    client: httpx2.AsyncClient
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    @property
    def text(self) -> Any:
        """Token ids to text, as the output of a request has it."""
        return lambda ids: self.system.pipeline.model.tokenizer.decode(ids)

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.client.post(path, json=body)

    async def complete(self, **body: Any) -> Any:
        """The JSON of a completion that must succeed; 4 tokens after PROMPT unless said otherwise."""
        response = await self.post(COMPLETIONS, **{"prompt": list(PROMPT), "max_tokens": 4, **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, path: str = COMPLETIONS, **body: Any) -> tuple[int, dict[str, Any]]:
        """(status, error object) of a request that must be refused."""
        defaults = {"prompt": list(PROMPT)} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
        return error_of(await self.post(path, **{**defaults, **body}))

    async def events(self, path: str = COMPLETIONS, **body: Any) -> list[Any]:
        """The parsed events of a stream, "[DONE]" as text."""
        if path == COMPLETIONS:
            body = {"prompt": list(PROMPT), "max_tokens": 4, **body}
        async with self.client.stream("POST", path, json={"stream": True, **body}) as response:
            content = (await response.aread()).decode()
            assert response.status_code == 200, content
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(content)


def parse_events(content: str) -> list[Any]:
    """Each event is one `data:` line and an empty one."""
    assert content.endswith("\n\n")
    lines = content[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: httpx2.Response) -> tuple[int, dict[str, Any]]:
    """Checks the shape: exactly OpenAI's four members."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return response.status_code, body["error"]


@asynccontextmanager
async def a_server(directory: Path, *, security: Security = PLAIN, **options: Any) -> AsyncIterator[Http]:
    """One scripted prefill and decode worker unless said otherwise."""
    options = {"prefills": [ScriptedPrefill()], "decodes": [ScriptedDecode()], **options}
    async with a_system(directory, **options) as system:
        registry = CollectorRegistry()
        app = build_app(system.pipeline, security, registry, RpcMetrics(registry).observe)
        server = HttpServer(app, RouterConfig(model="tiny"), 0)
        try:
            await server.start()
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
                yield Http(system, server, client, registry)
        finally:
            await server.close()
