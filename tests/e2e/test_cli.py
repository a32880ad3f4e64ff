"""The command line against real processes: one readable line and a non-zero exit code on any error, nothing left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import Cluster

TINY = ("--dtype", "float32", "--kernels", "reference", "--max-model-len", "128", "--kv-cache-memory-bytes", "4194304",
        "--cpu-threads", "1")  # fmt: skip


def pagewire(*args: str, timeout: float = 90) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pagewire", *args], capture_output=True, text=True, timeout=timeout, check=False
    )


# pagewire/test_up.py and pagewire/test_cli.py ask for more of the same faults in CI.
nightly = pytest.mark.nightly


def one_line(done: "subprocess.CompletedProcess[str]", *names: str) -> None:
    """Asserts a failure that a person can read: no traceback, and it names what is wrong."""
    said = (done.stderr + done.stdout).strip()
    assert done.returncode != 0, said
    assert "Traceback" not in said
    assert all(name in said for name in names), said


def test_generate_json(cluster: Cluster) -> None:
    done = pagewire("generate", "hello there", "--target", cluster.target, "--max-tokens", "5", "--temperature", "0",
                    "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 5
    assert answer["finish_reason"] == "length"
    assert set(answer["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert answer["timing"]["ttft_ms"] > 0
    assert answer["prefill_worker"]
    assert answer["decode_worker"]
    plain = pagewire("generate", "hello there", "--target", cluster.target, "--max-tokens", "5", "--temperature", "0")
    assert plain.stdout == answer["text"] + "\n"


def test_chat_from_a_pipe(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagewire", "chat", "--target", cluster.target, "--max-tokens", "5",
         "--temperature", "0"],
        input="hi\nand again\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_generate_errors(cluster: Cluster) -> None:
    one_line(pagewire("generate", "x", "--target", "127.0.0.1:1"), "127.0.0.1:1")
    one_line(pagewire("generate", "x", "--target", cluster.target, "--top-p", "1.5"), "top_p", "1.5")
    one_line(pagewire("generate", "x", "--target", cluster.target, "--max-tokens", "9999"), "max_tokens", "9999", "256")
    one_line(pagewire("generate", "", "--target", cluster.target), "text")


def test_status_shows_every_role(cluster: Cluster) -> None:
    done = pagewire("status", "--target", cluster.target)
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout
    assert "decode" in done.stdout


@nightly
def test_print_config_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = tmp_path / "router.toml"
    toml.write_text('port = 1111\nmigration_limit = 7\nmodel = "/m"\n')
    monkeypatch.setenv("PAGEWIRE_PORT", "2222")
    done = pagewire("router", "--config", str(toml), "--port", "3333", "--print-config")
    assert done.returncode == 0, done.stderr
    assert "3333" in done.stdout
    assert "2222" not in done.stdout
    assert "7" in done.stdout


@nightly
def test_broken_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    one_line(pagewire("up", "--model", str(tmp_path), "--port", "0"), str(tmp_path))
    one_line(pagewire("up", "--model", str(tmp_path / "nowhere"), "--port", "0"), "nowhere")


@nightly
def test_wrong_redis_url(tiny_model: Callable[..., Path]) -> None:
    one_line(pagewire("up", "--model", str(tiny_model("llama")), "--port", "0", "--redis-url", "http://x"), "http://x")


@nightly
def test_unreachable_redis(tiny_model: Callable[..., Path]) -> None:
    url = "redis://127.0.0.1:1"
    one_line(
        pagewire("up", "--model", str(tiny_model("llama")), "--port", "0", "--redis-url", url),
        "redis_url",
        "127.0.0.1:1",
    )


@nightly
def test_port_in_use(tiny_model: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        one_line(pagewire("up", "--model", str(tiny_model("llama")), "--port", port, *TINY), port)


@nightly
def test_a_broken_weight_file(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    for file in tiny_model("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    one_line(pagewire("up", "--model", str(tmp_path), "--port", "0", *TINY), "model.safetensors")


@pytest.mark.parametrize("stop", [pytest.param(signal.SIGINT, marks=nightly), signal.SIGTERM])
def test_signals_end_it_cleanly(stop: signal.Signals, tiny_model: Callable[..., Path]) -> None:
    """An embedded Valkey, three services, one signal: exit 0 and no process is left."""
    cluster = Cluster(tiny_model("llama"), *TINY)
    with cluster:
        assert cluster.process is not None
        children = psutil.Process(cluster.process.pid).children(recursive=True)
        assert any("valkey" in c.name() for c in children)
        cluster.process.send_signal(stop)
        assert cluster.process.wait(timeout=30) == 0
        assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


@nightly
def test_a_child_that_dies_is_reported(tiny_model: Callable[..., Path]) -> None:
    cluster = Cluster(tiny_model("llama"), *TINY)
    try:
        with cluster:
            assert cluster.process is not None
            decode = next(
                c for c in psutil.Process(cluster.process.pid).children(recursive=True) if "decode" in c.cmdline()
            )
            decode.kill()
            code = cluster.process.wait(timeout=30)
            said = cluster.stderr()
            assert code != 0
            assert "decode" in said
            assert "SIGKILL" in said or "-9" in said
            cluster.process.stdout and cluster.process.stdout.close()
            cluster.process = None
    finally:
        cluster.process = None


def test_children_die_with_a_killed_parent(tiny_model: Callable[..., Path]) -> None:
    """SIGKILL of `pagewire up` itself leaves no service and no Valkey behind."""
    cluster = Cluster(tiny_model("llama"), *TINY)
    with cluster:
        process = cluster.process
        assert process is not None
        assert process.stdout is not None
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        cluster.process = None
        deadline = time.monotonic() + 10
        while alive := [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)
