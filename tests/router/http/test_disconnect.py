"""Whoever hangs up cancels what runs for them, at every moment; and the server's own end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.router.http.serving import CHAT, COMPLETIONS, Http, a_server, error_of, parse_events
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import PROMPT, eventually

SLOW = {"prompt": list(PROMPT), "max_tokens": 100}


def slow_decode() -> ScriptedDecode:
    return ScriptedDecode(script=Script(delay=0.02))


def quiet(http: Http) -> bool:
    workers = (*http.system.prefills, *http.system.decodes)
    return http.system.pipeline.num_active == 0 and not any(worker.num_running for worker in workers)


async def test_a_stream_that_is_left_is_cancelled(tmp_path: Path) -> None:
    async with a_server(tmp_path, decodes=[slow_decode()]) as http:
        async with http.client.stream("POST", COMPLETIONS, json={**SLOW, "stream": True}) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            assert http.system.pipeline.num_active == 1
            await lines.aclose()
        await eventually(lambda: quiet(http))
        await eventually(lambda: http.system.decodes[0].num_cancelled == 1)
        page = (await http.client.get("/metrics")).text
    assert 'pagewire:rpc_requests_total{code="CANCELLED",method="POST /v1/completions"} 1.0' in page


@pytest.mark.parametrize("prompt", [list(PROMPT), [[5], [6], [7]]])
async def test_an_answer_that_nobody_waits_for_is_cancelled(tmp_path: Path, prompt: list[Any]) -> None:
    num_prompts = 1 if prompt == list(PROMPT) else 3
    async with a_server(tmp_path, decodes=[slow_decode()]) as http:
        waiting = asyncio.create_task(http.post(COMPLETIONS, **{**SLOW, "prompt": prompt}))
        await eventually(lambda: http.system.decodes[0].num_tokens_sent > 5)
        assert http.system.pipeline.num_active == num_prompts
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: quiet(http))
        await eventually(lambda: http.system.decodes[0].num_cancelled == num_prompts)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(tmp_path: Path, stream: bool) -> None:
    async with a_server(tmp_path, prefills=[ScriptedPrefill(script=Script(hang=True))]) as http:
        waiting = asyncio.create_task(http.post(COMPLETIONS, **SLOW, stream=stream))
        await eventually(lambda: bool(http.system.prefills[0].requests))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: quiet(http))
        await eventually(lambda: http.system.prefills[0].num_cancelled == 1)


async def test_in_the_middle_of_the_body(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        _, writer = await asyncio.open_connection("127.0.0.1", http.server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await http.complete()
        page = (await http.client.get("/metrics")).text
    assert 'pagewire:rpc_requests_total{code="CANCELLED",method="POST /v1/completions"} 1.0' in page


async def test_two_requests_on_one_connection_at_once(tmp_path: Path) -> None:
    """HTTP pipelining: the second is answered after the first."""
    async with a_server(tmp_path) as http:
        body = json.dumps({"prompt": list(PROMPT), "max_tokens": 4}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        request = head % len(body) + body
        reader, writer = await asyncio.open_connection("127.0.0.1", http.server.port)
        writer.write(request + request)
        answers = b""
        async with asyncio.timeout(60):
            while answers.count(b'"finish_reason":"length"') < 2:
                answers += await reader.read(4096)
        writer.close()
        await writer.wait_closed()
    assert answers.count(b"HTTP/1.1 200 OK") == 2


async def test_drain_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    async with a_server(tmp_path, decodes=[slow_decode()]) as http:
        running = asyncio.create_task(
            http.post(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=30, stream=True)
        )
        await eventually(lambda: http.system.decodes[0].num_tokens_sent > 2)
        http.system.pipeline.start_drain()
        refused = await http.post(COMPLETIONS, **SLOW)
        assert error_of(refused)[0] == 503
        assert (await http.client.get("/health")).status_code == 503
        await asyncio.gather(http.system.pipeline.drain(), http.server.drain())
        *chunks, done = parse_events((await running).text)
        assert done == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx2.ConnectError):
            await http.client.get("/health")


async def test_close_ends_what_still_runs(tmp_path: Path) -> None:
    async with a_server(tmp_path, decodes=[slow_decode()]) as http:
        running = asyncio.create_task(http.post(COMPLETIONS, **SLOW))
        await eventually(lambda: http.system.decodes[0].num_tokens_sent > 2)
        await http.server.close()
        await eventually(lambda: quiet(http))
        with pytest.raises(httpx2.TransportError):
            await running
