"""Every refusal and failure in OpenAI's form, with the right status; and nothing of a bug but its id."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

import router.http.body
from pagewire.errors import FailedPrecondition, PagewireError
from pagewire.security import Security
from tests.router.http.serving import CHAT, COMPLETIONS, a_server, error_of
from tests.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill
from tests.router.system import PROMPT, eventually

HI = [{"role": "user", "content": "hi"}]

# (path, body, param, part of the message)
BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETIONS, {"temperature": -1}, "temperature", "temperature = -1"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature", "valid number"),
    (COMPLETIONS, {"temperature": True}, "temperature", "valid number"),
    (COMPLETIONS, {"top_p": 0}, "top_p", "(0, 1]"),
    (COMPLETIONS, {"n": 0}, "n", "1 … 64"),
    (COMPLETIONS, {"n": 1.5}, "n", "valid integer"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (COMPLETIONS, {"max_tokens": 1000}, "max_tokens", "at most 122"),
    (COMPLETIONS, {"max_tokens": 10**400}, "max_tokens", "at most"),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most max_tokens = 3"),
    (COMPLETIONS, {"seed": 2**64}, "seed", "less than"),
    (COMPLETIONS, {"priority": 2**31}, "priority", "less than"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "0 … 20"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    (COMPLETIONS, {"logit_bias": {"300": 1}}, "logit_bias", "vocabulary"),
    (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "at most 16"),
    (COMPLETIONS, {"stop": [""]}, "stop[0]", "characters"),
    (COMPLETIONS, {"stop": [1]}, "stop[0]", "valid string"),
    (COMPLETIONS, {"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "must not be empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": [1, -2]}, "prompt[1]", "token id"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt[1]", "token id"),
    (COMPLETIONS, {"prompt": [1, 300]}, "prompt[1]", "vocabulary size of 300"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt[1]", "of one kind"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "at most 128"),
    (COMPLETIONS, {"prompt": None}, "prompt", "is missing"),
    (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of", "must be in n = 3 … 64"),
    (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    (COMPLETIONS, {"allowed_token_ids": [300]}, "allowed_token_ids", "vocabulary"),
    (COMPLETIONS, {"bad_words": [" "]}, "bad_words[0]", "not only spaces"),
    (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 for as many as fit"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "together with stream"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "0 … 20"),
    (COMPLETIONS, {"use_beam_search": True}, "num_beams", "2 … 16"),
    (
        COMPLETIONS,
        {"use_beam_search": True, "num_beams": 2, "logit_bias": {"5": 1}},
        "logit_bias",
        "together with beam_search",
    ),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
    (COMPLETIONS, {"messages": HI}, "messages", "not a parameter"),
    (COMPLETIONS, {"guided_regex": "(", "temperature": 0}, "guided_regex", "is refused"),
    (COMPLETIONS, {"guided_json": True}, "guided_json", "valid string"),
    (COMPLETIONS, {"top_k": 2**32}, "top_k", "2**32-1"),
    (COMPLETIONS, {"length_penalty": 0.5}, "length_penalty", "only for beam search"),
    (COMPLETIONS, {"early_stopping": "never"}, "early_stopping", "only for beam search"),
    (COMPLETIONS, {"num_beams": 0}, "num_beams", "2 … 16"),
    (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "together with guided_regex"),
    (COMPLETIONS, {"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "no constraint"),
    (
        COMPLETIONS,
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    (COMPLETIONS, {"guided_regex": "a", "min_tokens": 1}, "min_tokens", "together with structured_output"),
    (COMPLETIONS, {"guided_choice": ["a" * 70000]}, "guided_choice", "at most 65536"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "JSON Schema"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "chat template"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0]", "function"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT, {"tool_choice": "sometimes"}, "tool_choice", "none, auto, required"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "newer name"),
    (
        CHAT,
        {"messages": [{**HI[0], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON",
    ),
    (CHAT, {"nonsense": 1}, "nonsense", "not a parameter"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a parameter"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs = true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "older name"),
    (CHAT, {"messages": []}, "messages", "at least one"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "dictionary"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "must be a text"),
    (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "characters"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
    (CHAT, {"messages": [{**HI[0], "weight": 1}]}, "messages[0].weight", "not supported"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "only text"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "set by the router"),
    (CHAT, {"add_special_tokens": True}, "add_special_tokens", "chat template"),
]


async def test_bad_fields_are_named(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        for path, body, param, message in BAD:
            status, error = await http.error(path, **body)
            assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), (body, error)
            assert message in error["message"], (body, error)
        assert not http.system.prefills[0].requests


async def test_context_length_has_its_code(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        for body in ({"prompt": [5] * 128}, {"prompt": "a" * 500}):
            status, error = await http.error(**body)
            assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
        status, error = await http.error(CHAT, messages=[{"role": "user", "content": "a" * 500}])
        assert (status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")


async def test_what_is_not_there_is_404(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        status, error = await http.error(model="other")
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert error_of(await http.client.get("/v1/models/a/b"))[0] == 404
        assert error_of(await http.client.get("/v1/nothing"))[0] == 404
        wrong_method = await http.client.get(CHAT)
        assert error_of(wrong_method)[0] == 405
        assert wrong_method.headers["allow"] == "POST"


NO_JSON = [
    (b"", "EOF"),
    (b"[]", "JSON object"),
    (b'{"prompt": "a"', "EOF"),
    (b'{"prompt": "\\ud800"}', "escape"),
    (b'{"prompt": "\xff"}', "JSON"),
    (b'{"temperature": NaN}', "JSON"),
    (b'{"prompt":' + b"[" * 100_000, "recursion"),
]


async def test_a_body_that_is_no_json(tmp_path: Path) -> None:
    async with a_server(tmp_path) as http:
        headers = {"content-type": "application/json"}
        for content, message in NO_JSON:
            status, error = error_of(await http.client.post(COMPLETIONS, content=content, headers=headers))
            assert (status, error["param"]) == (400, "body")
            assert message in error["message"]


async def test_body_type_and_size_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_server(tmp_path) as http:
        body = json.dumps({"prompt": "hi"})
        assert error_of(await http.client.post(COMPLETIONS, content=body))[0] == 415
        monkeypatch.setattr(router.http.body, "MAX_BODY_BYTES", 1000)
        headers = {"content-type": "application/json"}
        large = json.dumps({"prompt": "a" * 1000})
        status, error = error_of(await http.client.post(COMPLETIONS, content=large, headers=headers))
        assert (status, error["code"]) == (413, "request_too_large")

        async def chunks() -> Any:
            for start in range(0, len(large), 100):
                yield large[start : start + 100].encode()

        assert error_of(await http.client.post(COMPLETIONS, content=chunks(), headers=headers))[0] == 413
        await http.complete()  # the server lives


async def test_a_body_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.http.body, "BODY_SECONDS", 0.1)
    async with a_server(tmp_path) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.server.port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        writer.write(head.encode())
        status = await reader.readline()
        writer.close()
        await writer.wait_closed()
    assert b" 408 " in status


async def test_a_token_is_wanted_under_v1_only(tmp_path: Path) -> None:
    async with a_server(tmp_path, security=Security(tokens=("first", "second"))) as http:
        for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}):
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", COMPLETIONS)):
                response = await http.client.request(method, path, headers=headers)
                assert error_of(response)[0] == 401
                assert response.headers["www-authenticate"] == "Bearer"
        for token in ("first", "second"):
            headers = {"authorization": f"Bearer {token}"}
            assert (await http.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.client.get("/health")).status_code == 200
        assert (await http.client.get("/metrics")).status_code == 200


async def test_too_many_requests_say_when_to_retry(tmp_path: Path) -> None:
    prefill = ScriptedPrefill(script=Script(hang=True))
    async with a_server(tmp_path, prefills=[prefill], max_concurrent_requests=1) as http:
        running = asyncio.create_task(http.post(COMPLETIONS, prompt=list(PROMPT)))
        await eventually(lambda: bool(prefill.requests))
        for path in (COMPLETIONS, CHAT):
            response = await http.post(
                path, stream=True, **({"prompt": "a"} if path == COMPLETIONS else {"messages": HI})
            )
            assert error_of(response)[0] == 429
            assert response.headers["retry-after"] == "1"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_have_their_status(tmp_path: Path, stream: bool) -> None:
    refusing = ScriptedPrefill(script=Script(refuse=grpc.StatusCode.INTERNAL, refuse_message="broken"))
    async with a_server(tmp_path, prefills=[refusing]) as http:
        status, error = await http.error(stream=stream)
        assert (status, error["type"], error["code"]) == (500, "server_error", "internal")
        refusing.script = Script(hang=True)
        http.system.pipeline._timeout = 0.1
        status, error = await http.error(stream=stream)
        assert (status, error["code"]) == (504, "deadline_exceeded")
        http.system.pipeline._timeout = 10.0
        http.system.placer.lost = {"p0", "d0"}
        response = await http.post(COMPLETIONS, prompt=list(PROMPT), stream=stream)
        assert error_of(response)[0] == 503
        assert response.headers["retry-after"] == "1"
        assert (await http.client.get("/health")).status_code == 503


async def test_a_failure_in_mid_stream_is_the_last_event(tmp_path: Path) -> None:
    decode = ScriptedDecode(script=Script(fail_after=2, fail_code=grpc.StatusCode.INTERNAL))
    async with a_server(tmp_path, decodes=[decode]) as http:
        *chunks, last = await http.events(max_tokens=8)
        assert chunks
        assert all("choices" in chunk for chunk in chunks)
        assert last["error"]["type"] == "server_error"
        assert "scripted failure" in last["error"]["message"]
        status = (await http.client.get("/metrics")).text
    assert 'pagewire:rpc_requests_total{code="INTERNAL",method="POST /v1/completions"} 1.0' in status


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_bug_only_its_id_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async def broken(call: Any) -> Any:
        raise RuntimeError("secret")

    async with a_server(tmp_path) as http:
        monkeypatch.setattr(http.system.pipeline._encoder, "worker_call", broken)
        status, error = await http.error(stream=stream)
        monkeypatch.undo()
        await http.complete()
    assert (status, error["code"]) == (500, "internal")
    assert "secret" not in error["message"]
    (record,) = [record for record in caplog.records if record.exc_info and "secret" in str(record.exc_info[1])]
    assert record.__dict__["error_id"] in error["message"]


async def test_parameters_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    nothing = {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": False,
               "metadata": {"a": "b"}, "top_logprobs": None, "stop": None, "stream_options": None}  # fmt: skip
    async with a_server(tmp_path) as http:
        response = await http.post(CHAT, messages=HI, max_tokens=2, **nothing)
        assert response.status_code == 200, response.text
        await http.complete(best_of=1, suffix="", echo=False, logprobs=None, use_beam_search=False)


@pytest.mark.parametrize("more", [{}, {"echo": True, "max_tokens": 4}, {"return_token_ids": True, "max_tokens": 4}])
async def test_a_long_text_is_given_up_where_it_no_longer_fits(tmp_path: Path, more: dict[str, Any]) -> None:
    async with a_server(tmp_path) as http:
        status, error = error_of(await http.post(COMPLETIONS, prompt="ab" * 100_000, **more))
        assert status == 400
        assert "the prompt has at least" in error["message"]
        http.system.pipeline.start_drain()
        status, error = error_of(await http.post(COMPLETIONS, prompt="ab", **more))
        assert (status, "draining" in error["message"]) == (503, True)


async def test_tokenizing_has_the_deadline_and_the_place_of_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_server(tmp_path, max_concurrent_requests=1, request_timeout=1.0) as http:

        async def hangs(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(60)

        monkeypatch.setattr(http.system.pipeline._encoder.prompts, "encode", hangs)
        running = asyncio.create_task(http.post(COMPLETIONS, prompt="ab"))
        await eventually(lambda: http.system.pipeline.num_active == 1)
        assert error_of(await http.post(COMPLETIONS, prompt="ab"))[0] == 429
        assert error_of(await running)[0] == 504
        assert http.system.pipeline.num_active == 0


async def test_health_says_why(tmp_path: Path) -> None:
    obstacle: list[PagewireError] = []
    async with a_server(tmp_path, obstacle=lambda: obstacle[0] if obstacle else None) as http:
        assert (await http.client.get("/health")).json() == {"status": "ok"}
        obstacle.append(FailedPrecondition("the workers have another tokenizer", reason="TOKENIZER_MISMATCH"))
        response = await http.client.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "the workers have another tokenizer"})
        obstacle.clear()
        http.system.placer.lost = {"p0", "d0"}
        assert (await http.client.get("/health")).json() == {"status": "no worker can serve now"}
