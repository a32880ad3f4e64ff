"""`pagewire bench serve` against real processes, over both APIs: what it counts is what the system did."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.cli.app import run
from tests.clients.conftest import Served

SHARED = ("--dataset-name", "prefix-repetition", "--prefix-repetition-num-prefixes", "2", "--num-prompts", "8",
          "--prefix-repetition-prefix-len", "40", "--prefix-repetition-suffix-len", "8", "--output-len", "6",
          "--ignore-eos", "--seed", "4")  # fmt: skip


def bench(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result, details too."""
    saved = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    code = run(["bench", "serve", *saved, *flags])
    return code, json.loads((tmp_path / "r.json").read_text())


def test_grpc_and_http_count_the_same(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.cluster.reset_caches()
    before = served.metrics("router")["vllm:generation_tokens_total"]
    limits = ("--max-concurrency", "3", "--request-rate", "40", "--goodput", "ttft:60000", "tpot:60000")
    code, found = bench(tmp_path, *SHARED, *limits, "--target", served.cluster.target, "--report")
    assert code == 0, capsys.readouterr()
    assert (found["completed"], found["failed"], found["model_id"]) == (8, 0, "tiny")
    assert found["input_lens"] == [48] * 8
    assert found["output_lens"] == [6] * 8
    assert served.metrics("router")["vllm:generation_tokens_total"] - before == 48
    assert found["total_cached_tokens"] > 0  # the prefixes repeat
    assert 0 < found["max_concurrent_requests"] <= 3
    assert found["request_goodput"] == found["request_throughput"]
    for ttft, itls, latency in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert 0 < ttft <= latency
        assert ttft + sum(itls) == pytest.approx(latency)
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert "<h1>pagewire bench serve: tiny</h1>" in (tmp_path / "r.html").read_text()
    said = capsys.readouterr().out
    assert "Total generated tokens:                  48" in said

    assert "ramp_up_strategy" not in found
    growing = ("--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "80")
    http = ("--backend", "openai", "--port", str(served.http_port), "--tokenizer", str(served.model))
    code, over_http = bench(tmp_path, *SHARED, *growing, *http)
    assert over_http["request_rate"] == "inf"
    assert (over_http["ramp_up_strategy"], over_http["ramp_up_end_rps"]) == ("exponential", 80)
    assert code == 0, capsys.readouterr()
    for name in ("completed", "input_lens", "output_lens", "total_output_tokens"):
        assert over_http[name] == found[name]


def test_a_bar_on_a_terminal(served: Served) -> None:
    """And only there: the table goes to stdout as ever."""
    command = [sys.executable, "-m", "pagewire", "bench", "serve", *SHARED, "--target", served.cluster.target]
    reader, terminal = pty.openpty()
    shown, process = bytearray(), subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
        while part := os.read(reader, 4096):
            shown += part
    os.close(reader)
    table, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert b"requests" in shown
    assert b"8/8" in shown
    assert b"tokens/s" in shown
    assert "Successful requests:" in table
    assert "8/8" not in table


def test_errors_are_counted_by_code(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "fine", "output_tokens": 3}\n'
        '{"prompt": "too many", "output_tokens": 9999}\n'
        '{"prompt": [99999], "output_tokens": 3}\n'
    )
    file = ("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", "3", "--disable-shuffle")
    code, found = bench(tmp_path, *file, "--target", served.cluster.target)
    assert code == 1
    assert (found["completed"], found["failed"]) == (1, 2)
    assert found["errors_by_code"] == {"INVALID_ARGUMENT": 2}
    assert found["errors"][0] == ""
    assert "max_tokens" in found["errors"][1]
    assert "99999" in found["errors"][2]
    said = capsys.readouterr()
    assert "INVALID_ARGUMENT:                      2" in said.out
    assert "failed: INVALID_ARGUMENT: " in said.err
    code, found = bench(tmp_path, *file, "--backend", "openai", "--port", str(served.http_port))
    assert (code, found["errors_by_code"]) == (1, {"HTTP 400": 2})


def test_nobody_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--target", "127.0.0.1:1", "--num-prompts", "1"]) == 1
    assert run(["bench", "serve", "--backend", "openai-chat", "--port", "1", "--dataset-name", "custom",
                "--dataset-path", __file__]) == 1  # fmt: skip
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: UNAVAILABLE: ")
    assert second.startswith("error: ConnectError: http://127.0.0.1:1/v1/models")


def test_an_interrupt_reports_what_was_measured(served: Served, tmp_path: Path) -> None:
    """Two are quick, the third is due in an hour."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "output_tokens": 3}\n')
    process = subprocess.Popen(
        [sys.executable, "-c", _NOTICE, "bench", "serve", "--target", served.cluster.target, "--dataset-name", "custom",
         "--dataset-path", str(prompts), "--num-prompts", "3", "--request-rate", "0.0008", "--burstiness", "0.02",
         "--seed", "1", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line == "finished\n":
            break
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Interrupted" in said
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["interrupted"] is True
    assert 0 < found["completed"] < 3
    assert found["failed"] == 0


# The command, which says when a request has ended: its bar is only for terminals.
_NOTICE = """
import sys
from pagewire import token_progress
ended = token_progress.TokenProgress.finished
def finished(self):
    ended(self)
    print("finished", file=sys.stderr, flush=True)
token_progress.TokenProgress.finished = finished
from pagewire.cli import main
main()
"""
