"""The supervisor with stand-in children: ready lines, deaths, order of stopping, and no survivors."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pagewire.supervisor import ChildFailed, ChildSpec, Supervisor

# Says ready after argv[2] seconds; on SIGTERM appends its name to the file argv[3] and exits after argv[4] seconds.
CHILD = """
import signal, sys, time
from pagewire.supervisor import die_with_parent
die_with_parent()
role, delay, journal, linger = sys.argv[1], float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
def on_term(number, frame):
    time.sleep(linger)
    with open(journal, "a") as file:
        file.write(role + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
time.sleep(delay)
print("noise", flush=True)
print(f"pagewire {role} ready 127.0.0.1:{1000 + len(role)}", flush=True)
while True:
    time.sleep(60)
"""


def never() -> bool:
    return False


def nothing() -> None:
    """No display."""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path)
    yield supervisor
    for child in supervisor.children:
        if child.process.poll() is None:
            child.kill()


@pytest.fixture
def start(supervisor: Supervisor, tmp_path: Path) -> Callable[..., None]:
    def start(role: str, name: str = "", delay: float = 0.0, linger: float = 0.0) -> None:
        argv = (sys.executable, "-c", CHILD, role, str(delay), str(tmp_path / "journal"), str(linger))
        supervisor.start(ChildSpec(name or role, role, argv))

    return start


def journal(tmp_path: Path) -> list[str]:
    path = tmp_path / "journal"
    return path.read_text().split() if path.exists() else []


def test_ready_lines_and_stop_in_order(supervisor: Supervisor, start: Callable[..., None], tmp_path: Path) -> None:
    start("prefill", "prefill-0")
    start("decode", "decode-0", delay=0.1, linger=0.3)
    start("router")
    ticks: list[int] = []
    ready = supervisor.wait_ready(20, stopped=never, tick=lambda: ticks.append(1))
    assert ready
    assert ticks
    assert [child.endpoint for child in supervisor.children] == ["127.0.0.1:1007", "127.0.0.1:1006", "127.0.0.1:1006"]
    assert supervisor.stop(("router", "decode", "prefill"), timeout=10) == []
    assert journal(tmp_path) == ["router", "decode", "prefill"]


def test_told_to_stop_while_waiting(supervisor: Supervisor, start: Callable[..., None]) -> None:
    start("router", delay=60)
    started = time.monotonic()
    assert not supervisor.wait_ready(50, stopped=lambda: time.monotonic() - started > 0.3, tick=nothing)
    assert time.monotonic() - started < 40


def test_late_child_is_named(supervisor: Supervisor, start: Callable[..., None]) -> None:
    start("prefill", "prefill-0")
    start("decode", "decode-7", delay=60)
    with pytest.raises(TimeoutError, match=r"^decode-7 not ready after 2 s$"):
        supervisor.wait_ready(2, stopped=never, tick=nothing)


@pytest.mark.parametrize(
    ("program", "reason", "error"),
    [
        ("import sys; print('error: no such thing', file=sys.stderr); sys.exit(3)", "exit code 3", "no such thing"),
        ("raise ZeroDivisionError('oops')", "exit code 1", None),
        ("import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
         "signal SIGKILL", None),
    ],
)  # fmt: skip
def test_death_is_reported_with_reason_and_tail(
    supervisor: Supervisor, program: str, reason: str, error: str | None
) -> None:
    supervisor.start(ChildSpec("decode-0", "decode", (sys.executable, "-c", program)))
    with pytest.raises(ChildFailed) as caught:
        supervisor.wait_ready(20, stopped=never, tick=nothing)
    assert (caught.value.name, caught.value.reason, caught.value.error) == ("decode-0", reason, error)
    assert str(caught.value) == f"decode-0 ended with {reason}"
    assert any(words in caught.value.tail for words in ("no such thing", "oops", "last words"))


def test_death_after_ready_is_noticed(supervisor: Supervisor, start: Callable[..., None]) -> None:
    start("prefill")
    assert supervisor.wait_ready(20, stopped=never, tick=nothing)
    supervisor.check()
    supervisor.children[0].process.kill()
    supervisor.children[0].process.wait()
    with pytest.raises(ChildFailed, match="prefill ended with signal SIGKILL"):
        supervisor.check()


def test_child_that_does_not_stop_is_killed_and_named(supervisor: Supervisor, start: Callable[..., None]) -> None:
    start("decode", "decode-0", linger=60)
    start("prefill", "prefill-0")
    assert supervisor.wait_ready(20, stopped=never, tick=nothing)
    assert supervisor.stop(("decode", "prefill"), timeout=0.5) == ["decode-0"]
    assert all(child.process.poll() is not None for child in supervisor.children)


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    parent_program = f"""
import sys
from pathlib import Path
from pagewire.supervisor import ChildSpec, Supervisor
supervisor = Supervisor(Path({str(tmp_path)!r}))
argv = (sys.executable, "-c", {CHILD!r}, "router", "0", {str(tmp_path / "journal")!r}, "0")
child = supervisor.start(ChildSpec("router", "router", argv))
supervisor.wait_ready(20, stopped=lambda: False, tick=lambda: None)
print(child.process.pid, flush=True)
import time
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", parent_program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    # The kernel kills it; whoever inherits the zombie may take its time.
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert journal(tmp_path) == []


def test_child_whose_parent_is_gone_already_ends_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PAGEWIRE_PARENT_PID": "1"}
    program = "from pagewire.supervisor import die_with_parent; die_with_parent(); print('alive')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
