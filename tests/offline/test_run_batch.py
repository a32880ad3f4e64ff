"""`pagewire run-batch` on an engine in its process: every line gets one answer, also when it is killed on the way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offline.generation import OfflineBackend
from offline.run_batch import open_local, open_remote, run_batch
from pagewire import SamplingParams
from pagewire.config import EngineOptions
from pagewire.errors import InvalidArgument, PagewireError
from tests.offline.models import OPTIONS, TinyModel, tiny_llm

FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
OpenTiny = partial[OfflineBackend]


@pytest.fixture
def open_tiny(tiny_model: TinyModel) -> OpenTiny:
    return partial(open_local, EngineOptions(model=str(tiny_model("llama")), served_model_name="tiny", **OPTIONS))


def completion(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Answers (no bad lines) by custom id, each of which must be there once."""
    answers = [answer for answer in read(path) if answer["error"] is None]
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert len(found) == len(answers)
    return found


def command(source: Path, out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "pagewire", "run-batch", str(source), str(out), *flags]


def test_bodies_are_openais_and_the_llms_text(
    tmp_path: Path, tiny_model: TinyModel, open_tiny: OpenTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "in.jsonl",
        completion("one", "hello there"),
        completion("many", [[5, 6, 7], [8, 9]], n=2, seed=3, temperature=1.0, return_token_ids=True),
        completion("logprobs", "hello", logprobs=1),
        chat("chat", "hi", stop=["q"]),
        chat("path", "hi", model="the/path", max_tokens=4),
    )
    out = tmp_path / "out.jsonl"
    run_batch(source, out, open_tiny, model_name="the/path")
    answers = by_id(out)
    assert {answer["status_code"] for answer in answers.values()} == {200}
    bodies = {name: answer["body"] for name, answer in answers.items()}
    params = SamplingParams(max_tokens=8, temperature=0)
    with tiny_llm(tiny_model("llama")) as llm:
        (one,) = llm.generate("hello there", params)
        many = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=8, n=2, seed=3))
        (hi,) = llm.chat([{"role": "user", "content": "hi"}], params)
    assert bodies["one"]["choices"][0]["text"] == one.outputs[0].text
    assert bodies["one"]["object"] == "text_completion"
    assert bodies["one"]["usage"]["completion_tokens"] == 8
    assert answers["one"]["request_id"] == bodies["one"]["id"]
    choices = [choice.token_ids for output in many for choice in output.outputs]
    assert [choice["token_ids"] for choice in bodies["many"]["choices"]] == choices
    assert len(bodies["logprobs"]["choices"][0]["logprobs"]["token_logprobs"]) == 8
    assert bodies["chat"]["choices"][0]["message"]["content"] == hi.outputs[0].text
    assert bodies["path"]["usage"]["completion_tokens"] == 4
    said = capsys.readouterr().out
    num_tokens = sum(body["usage"]["completion_tokens"] for body in bodies.values())
    assert "5 requests: 5 ok, 0 failed; " in said
    assert f" and {num_tokens} output tokens in " in said


def test_what_is_wrong_with_a_line_is_its_answer(
    tmp_path: Path, open_tiny: OpenTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "in.jsonl",
        completion("a", "x"),
        "no json",
        "",
        completion("a", "y"),
        {**completion("e", "x"), "url": "/v1/embeddings"},
        completion("hot", "x", temperature=-1),
        chat("tools", "x", tools=[{"type": "function"}]),
        completion("stream", "x", stream=True),
        completion("other", "x", model="gpt-4"),
        completion("long", [5] * 300),
    )
    out = tmp_path / "out.jsonl"
    run_batch(source, out, open_tiny)
    answers = by_id(out)
    assert {name: answer["status_code"] for name, answer in answers.items()} == {
        "a": 200, "hot": 400, "tools": 400, "stream": 400, "other": 404, "long": 400
    }  # fmt: skip
    assert answers["hot"]["body"]["error"]["param"] == "temperature"
    assert answers["other"]["body"]["error"]["code"] == "model_not_found"
    assert answers["stream"]["body"]["error"]["message"] == "stream = True: must be false in a batch"
    assert answers["long"]["body"]["error"]["code"] == "context_length_exceeded"
    bad = {answer["error"]["line"]: answer for answer in read(out) if answer["error"] is not None}
    assert {line: (answer["custom_id"], answer["error"]["code"]) for line, answer in bad.items()} == {
        2: (None, "invalid_json_line"),
        4: ("a", "duplicate_custom_id"),
        5: ("e", "invalid_url"),
    }
    assert "9 requests: 1 ok, 8 failed; " in capsys.readouterr().out
    before = out.read_bytes()
    run_batch(source, out, open_tiny)
    assert out.read_bytes() == before, "a second run has nothing to do, bad lines included"
    assert "0 requests: 0 ok, 0 failed, 6 answered before" in capsys.readouterr().out


def test_a_huge_file_is_read_as_it_is_answered(tmp_path: Path, open_tiny: OpenTiny) -> None:
    """Through a pipe, whose writer sees how far the reader is ahead of the answers."""
    source, out, padding = tmp_path / "in.jsonl", tmp_path / "out.jsonl", "x" * 8000
    os.mkfifo(source)
    ahead: list[int] = []

    def feed() -> None:
        with source.open("w") as file:
            for number in range(200):
                file.write(json.dumps(completion(f"r{number}", [5 + number], user=padding, max_tokens=2)) + "\n")
                ahead.append(number + 1 - out.read_bytes().count(b"\n"))

    def open_small() -> OfflineBackend:
        backend = open_tiny()
        backend.num_in_flight = 4
        return backend

    out.touch()
    feeder = threading.Thread(target=feed)
    feeder.start()
    run_batch(source, out, open_small)
    feeder.join()
    assert len(by_id(out)) == 200
    assert max(ahead) < 40, "4 in flight, 64 KiB in the pipe, the buffers of both ends"


def test_a_system_that_is_gone_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", completion("a", "x"))
    with pytest.raises(PagewireError, match=r"127\.0\.0\.1:1"):
        run_batch(source, tmp_path / "out.jsonl", partial(open_remote, "127.0.0.1:1", None, 4, {}))
    said = capsys.readouterr()
    assert "0 requests" in said.out
    assert "the same command goes on" in said.err
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    with pytest.raises(InvalidArgument, match="must not be the input"):
        run_batch(source, source, partial(open_remote, "127.0.0.1:1", None, 4, {}))


def test_usage_errors(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl")
    for flags, said, code in (
        ([], "--model or --target is required", 2),
        (["--target", "t:1", "--dtype", "float32"], "--dtype: is an engine's option", 2),
        (["--model", "/nowhere"], "no such directory", 2),
    ):
        done = subprocess.run(
            command(source, tmp_path / "out", *flags), capture_output=True, text=True, timeout=90, check=False
        )
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def many(count: int, max_tokens: int) -> list[dict[str, Any]]:
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.9}
    return [completion(f"r{n}", [5 + n % 200, 7], seed=n, **sampling) for n in range(count)]


def wait_for_lines(out: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while not out.exists() or out.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_leaves_what_is_answered(
    tmp_path: Path, open_tiny: OpenTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, main = write(tmp_path / "in.jsonl", *many(80, 24)), tmp_path / "out.jsonl", threading.main_thread()

    def interrupt() -> None:
        wait_for_lines(out, 3)
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        run_batch(source, out, open_tiny)
    killer.join()
    said = capsys.readouterr()
    num_answered = len(by_id(out))
    assert 3 <= num_answered < 80
    assert f"{num_answered} requests: {num_answered} ok" in said.out
    assert "the same command goes on" in said.err
    run_batch(source, out, open_tiny)
    assert len(by_id(out)) == 80
    assert f"{num_answered} answered before" in capsys.readouterr().out


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_killed_in_the_middle_and_run_again(tmp_path: Path, tiny_model: TinyModel) -> None:
    """kill -9 and a torn line, then to the end: each request is answered once, as if nothing had been."""
    model, count = tiny_model("llama"), 100
    requests = many(count, 24)
    source, out = write(tmp_path / "in.jsonl", *requests, "bad line"), tmp_path / "out.jsonl"
    flags = ["--model", str(model), "--served-model-name", "tiny", *FLAGS]
    with subprocess.Popen(command(source, out, *flags), stdout=subprocess.DEVNULL) as run:
        try:
            wait_for_lines(out, 20)
        finally:
            run.kill()
    assert 20 <= len(by_id(out)) < count, "it was over before it was killed"
    with out.open("a") as file:
        file.write('{"id":"batch_req_torn","custom_id":"r59')
    done = subprocess.run(command(source, out, *flags), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    answers = by_id(out)
    assert set(answers) == {request["custom_id"] for request in requests}
    assert [answer["error"]["line"] for answer in read(out) if answer["error"] is not None] == [count + 1]
    with tiny_llm(model) as llm:
        prompts = [request["body"]["prompt"] for request in requests]
        params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=n, temperature=0.9) for n in range(count)]
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert [answers[f"r{n}"]["body"]["choices"][0]["text"] for n in range(count)] == expected
