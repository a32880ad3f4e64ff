"""A target that is full, or silent: what is sent again, what is given up, what is cancelled."""

import json
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from offline import remote
from offline.remote import RemoteBackend
from offline.run_batch import open_remote, run_batch
from pagewire import LLM, SamplingParams, sampling
from pagewire.errors import InvalidArgument, PagewireError
from router.request import BeamSearch, ChatPrompt, GenerateCall, Summary, TextOptions, TokenPrompt
from router.service import call_from_proto
from tests.pagewire.router_stub import running_stub

PARAMS = SamplingParams(max_tokens=3)


def test_a_full_system_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LONGEST_PAUSE", 0.05)
    with running_stub() as (target, router), LLM(target=target) as llm:
        router.fail_next = "full for a moment"
        (output,) = llm.generate("hello", PARAMS)
        assert output.outputs[0].text == "hel"
        assert len(router.requests) == 2
        assert output.prompt_token_ids == [ord(char) for char in "hello"]
        assert output.num_cached_tokens == 16


def test_patience_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(remote, "_LONGEST_PAUSE", 0.05)
    lines = [{"custom_id": text, "url": "/v1/completions", "body": {"prompt": text, "max_tokens": 3}}
             for text in ("fine", "!model", "!full")]  # fmt: skip
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    with running_stub() as (target, router):
        security = {"patience_seconds": 0.3}
        with pytest.raises(PagewireError, match="queue is full") as caught:
            run_batch(source, out, partial(open_remote, target, None, 1, security))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(router.requests) > 3
    answers = {a["custom_id"]: a["response"]["status_code"] for a in map(json.loads, out.read_text().splitlines())}
    assert answers == {"fine": 200, "!model": 400}, "what is the request's own fault is its answer"
    said = capsys.readouterr()
    assert "2 requests: 1 ok, 1 failed" in said.out
    assert "the same command goes on" in said.err


def test_ctrl_c_cancels_what_was_sent() -> None:
    main = threading.main_thread().ident or 0
    with running_stub() as (target, router), LLM(target=target) as llm:
        timer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate("!hang", SamplingParams(max_tokens=3))
        timer.join()
        assert router.cancelled.wait(20)
        assert llm.generate("hello", PARAMS)[0].outputs[0].text == "hel"


async def test_all_of_a_chat_is_sent() -> None:
    fields = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = ChatPrompt(
        (("user", "hello"), ("assistant", "")), message_fields=("", json.dumps(fields)), tools_json=json.dumps(tools)
    )
    call = GenerateCall(
        prompt,
        sampling.SamplingParams(max_tokens=3, allowed_token_ids=(1,), prompt_logprobs=1),
        TextOptions(bad_words=("x",)),
        truncate_prompt_tokens=5,
        best_of=3,
        beam_search=BeamSearch(2, 0.5, None),
    )
    with running_stub() as (target, router):
        backend = RemoteBackend(target)
        await backend.begin()
        try:
            await backend.tokenize(prompt)
            outputs = [output async for output in backend.generate(call)]
        finally:
            await backend.end()
    (tokenize,), (sent,) = router.tokenized, router.requests
    assert isinstance(outputs[-1], Summary)
    for request in (tokenize, sent):
        assert [message.fields_json for message in request.chat.messages] == ["", json.dumps(fields)]
        assert json.loads(request.chat.tools_json) == tools
    # The router's own reading of it.
    assert call_from_proto(sent, {}) == call


async def test_nothing_is_dropped_in_silence() -> None:
    call = GenerateCall(TokenPrompt((1,)), adapter="style")
    with pytest.raises(InvalidArgument, match="adapter = 'style': cannot be sent to a target"):
        await anext(RemoteBackend("t:1").generate(call))
    for name in ("tenant", "traceparent", "session_id"):
        with pytest.raises(InvalidArgument, match=f"{name} = 'x': cannot be sent to a target"):
            await anext(RemoteBackend("t:1").generate(GenerateCall(TokenPrompt((1,)), **{name: "x"})))


def test_a_batch_without_a_tokenizer_here(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "hello"}]
    bodies: list[dict[str, Any]] = [{}, {"prompt_logprobs": 1}, {"tools": [{"type": "function"}]}]
    lines = [{"custom_id": str(n), "url": "/v1/chat/completions", "body": {"messages": hello, "max_tokens": 3, **body}}
             for n, body in enumerate(bodies)]  # fmt: skip
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    with running_stub() as (target, _):
        run_batch(source, out, partial(open_remote, target, None, 1, {}))
    answers = {a["custom_id"]: a["response"] for a in map(json.loads, out.read_text().splitlines())}
    assert answers["0"]["body"]["choices"][0]["message"]["content"] == "1:h"
    for n, named in (("1", "prompt_logprobs"), ("2", "tools")):
        assert answers[n]["status_code"] == 400
        assert named in answers[n]["body"]["error"]["message"]
        assert "give --tokenizer" in answers[n]["body"]["error"]["message"]
