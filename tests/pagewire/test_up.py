"""`pagewire up` with the real services and a tiny model: ready, deaths, drain, and nothing left behind.

More of the kind, with requests in flight, is in tests/e2e.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pagewire import Client
from tests.pagewire.test_cli import ROOT, one_line_error, pagewire
from tests.ports import free_ports

START_SECONDS = 240.0
READY = re.compile(r"^ready (127\.0\.0\.1:\d+) after \d+\.\d s\n$")


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


class Up:
    """A running `pagewire up` whose temporary files lie in a directory of the test's."""

    def __init__(self, model: Path, directory: Path, *flags: str) -> None:
        self.directory = directory
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWIRE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagewire", "up", "--model", str(model), "--port", "0",
             "--kv-cache-memory-bytes", "16MiB", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**environment, "TMPDIR": str(directory)},
        )  # fmt: skip

    def wait_ready(self) -> str:
        """The address in the ready line, which is the first line of stdout."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = READY.match(line)
        assert match, (line, self.process.communicate()[1] if line == "" else "")
        return match[1]

    def children(self) -> dict[str, psutil.Process]:
        """Child processes by role ("router", "prefill", "decode", "valkey")."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = child.cmdline()
            except psutil.Error:
                continue  # it has just ended
            role = "valkey" if "valkey" in "".join(command[:1]) else "".join(command[3:4])
            if role not in ("", "up"):  # which it is between fork and exec
                found[role] = child
        return found

    def finish(self) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, stderr."""
        stdout, stderr = self.process.communicate(timeout=180)
        return self.process.returncode, stdout, stderr


@contextmanager
def running(model: Path, directory: Path, *flags: str) -> Iterator[Up]:
    up = Up(model, directory, *flags)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()
        for stream in (up.process.stdout, up.process.stderr):
            if stream is not None:
                stream.close()
        up.process.wait()


def assert_gone(children: dict[str, psutil.Process]) -> None:
    deadline = time.monotonic() + 60
    for role, child in children.items():
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{role} survived"
            time.sleep(0.05)


@pytest.mark.parametrize("role", ["decode", "valkey"])
def test_a_child_that_dies_ends_the_command(model: Path, tmp_path: Path, role: str) -> None:
    with running(model, tmp_path) as up:
        up.wait_ready()
        children = up.children()
        children[role].kill()
        code, stdout, stderr = up.finish()
        assert (code, stdout) == (1, "")
        if role == "valkey":
            assert stderr == "error: valkey (the embedded index) ended by itself\n"
        else:
            first, *tail = stderr.splitlines()
            assert first == f"error: {role}-0 ended with signal SIGKILL; the end of its log:"
            assert any("ready" in line for line in tail)
        assert_gone(children)
        assert list(tmp_path.iterdir()) == []


def test_signal_during_the_start_ends_it_cleanly(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as up:
        deadline = time.monotonic() + 120
        while len(up.children()) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        children = up.children()
        assert len(children) == 4
        up.process.terminate()
        assert up.finish() == (0, "", "")
        assert_gone(children)
        assert list(tmp_path.iterdir()) == []


def test_several_workers_metrics_and_a_redis_of_ones_own(model: Path, tmp_path: Path) -> None:
    from kvstore.embedded_valkey import EmbeddedValkey

    valkey = EmbeddedValkey.start(directory=tmp_path)
    try:
        metrics_port = free_ports(4)
        run_directory = tmp_path / "run"
        run_directory.mkdir()
        flags = ("--prefill", "2", "--redis-url", valkey.url, "--metrics-port", str(metrics_port))
        with running(model, run_directory, *flags) as up:
            target = up.wait_ready()
            status = pagewire("status", "--target", target).stdout
            assert all(name in status for name in ("prefill-0", "prefill-1", "decode-0"))
            assert status.count(" alive ") == 3
            children = up.children()
            assert children.keys() == {"router", "prefill", "decode"}
            for port in range(metrics_port, metrics_port + 4):
                with socket.create_connection(("127.0.0.1", port), 5):
                    pass
            with Client(target) as client:
                completion = client.complete("Hello", max_tokens=8, temperature=0)
            assert len(completion.token_ids) == 8
            assert completion.decode_worker.startswith("decode-0-")
            up.process.send_signal(signal.SIGINT)
            assert up.finish() == (0, "", "")
            assert_gone(children)
            assert list(run_directory.iterdir()) == []
        assert valkey.is_running
    finally:
        valkey.stop()


def test_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in ("up", "router"):
            message = one_line_error(pagewire(command, "--model", str(model), "--port", str(port)), 1)
            assert message == f"cannot listen on 127.0.0.1:{port}: port {port} is in use"


def test_wrong_redis_url(model: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}"
        message = one_line_error(pagewire("up", "--model", str(model), "--port", "0", "--redis-url", url), 1)
    assert message.startswith("redis_url: no Redis answers there: ")
    message = one_line_error(pagewire("up", "--model", str(model), "--redis-url", "http://x"), 2)
    assert message.startswith("redis_url = 'http://x' (--redis-url): must be a URL with one of the schemes redis://")


LATER = [pytest.param(broken, marks=pytest.mark.nightly) for broken in ("no weights", "bad config")]


@pytest.mark.parametrize("broken", ["bad weights", "no tokenizer", *LATER])
def test_broken_model_is_one_line(model: Path, tmp_path: Path, broken: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    if broken == "no weights":
        (directory / "model.safetensors").unlink()
    elif broken == "bad weights":
        (directory / "model.safetensors").write_bytes(b"\x00" * 64)
    elif broken == "bad config":
        (directory / "config.json").write_text("{")
    else:
        (directory / "tokenizer.json").unlink()
    message = one_line_error(pagewire("up", "--model", str(directory), "--port", "0"), 1)
    assert re.match(r"(prefill-0|decode-0|router) ended with exit code 1: .", message)
    assert "model" in message
