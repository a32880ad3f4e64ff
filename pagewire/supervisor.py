"""Child processes of `pagewire up`: start, wait for their ready lines, notice deaths, stop in order.

No child outlives its parent: each asks the kernel for SIGKILL at the parent's death (`die_with_parent`). Children run
in sessions of their own, so that Ctrl-C in a terminal reaches the parent alone and it can stop them in order.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PARENT_PID = "PAGEWIRE_PARENT_PID"

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02
_TAIL_BYTES = 16 << 10
_TAIL_LINES = 20


def die_with_parent() -> None:
    """Called by a child at its start: the kernel kills it when the process that started it dies, however that dies.

    Does nothing in a process that was not started by a Supervisor.
    """
    parent = os.environ.get(PARENT_PID)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        # It died before the call above.
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `name` is unique ("prefill-0"), `role` is what its ready line says."""

    name: str
    role: str
    argv: tuple[str, ...]


class ChildFailed(Exception):
    """A child ended by itself. `reason` is "exit code 1" or "signal SIGKILL"; `tail` the end of its log.

    `error` is the line in which the child said itself what is wrong, if it did.
    """

    def __init__(self, name: str, reason: str, tail: str) -> None:
        super().__init__(f"{name} ended with {reason}")
        self.name = name
        self.reason = reason
        self.tail = tail
        stated = [line for line in tail.splitlines() if line.startswith("error: ")]
        self.error = stated[-1].removeprefix("error: ") if stated else None


class Child:
    """One running process whose output goes to a file."""

    def __init__(self, spec: ChildSpec, log: Path, environment: Mapping[str, str]) -> None:
        self.spec = spec
        self.log = log
        self.endpoint: str | None = None
        self.last_line = ""
        self._ready = re.compile(rf"^pagewire {re.escape(spec.role)} ready (\S+)$", re.MULTILINE)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, PARENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def look_for_ready(self) -> bool:
        """True once the ready line was written; `endpoint` then has its address. Until then, `last_line` is kept."""
        if self.endpoint is None:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            found = self._ready.search(text)
            self.endpoint = found[1] if found else None
            self.last_line = text.rstrip().rpartition("\n")[2]
        return self.endpoint is not None

    def failure(self) -> ChildFailed | None:
        """Why it ended, if it did."""
        code = self.process.poll()
        if code is None:
            return None
        reason = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return ChildFailed(self.spec.name, reason, self.tail())

    def tail(self) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def stop(self, timeout: float) -> bool:
        """SIGTERM, then SIGKILL after `timeout` seconds. False if it had to be killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout)
            return True
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.process.kill()
        self.process.wait()


class Supervisor:
    """The children of one run, in the order in which they were started; logs go to `run_directory`."""

    def __init__(self, run_directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self._run_directory = run_directory
        self._environment = dict(os.environ if environment is None else environment)
        self.children: list[Child] = []

    def start(self, spec: ChildSpec) -> Child:
        """Starts a process; returns at once."""
        child = Child(spec, self._run_directory / f"{spec.name}.log", self._environment)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raises ChildFailed if one has ended."""
        for child in self.children:
            if (failure := child.failure()) is not None:
                raise failure

    def wait_ready(self, timeout: float, *, stopped: Callable[[], bool], tick: Callable[[], None]) -> bool:
        """Until all children are ready: True, or False once `stopped()`. `tick` is called at each look.

        Raises ChildFailed, or TimeoutError naming who is late.
        """
        deadline = time.monotonic() + timeout
        while not stopped():
            self.check()
            # In full, so that each child's state is up to date for `tick`.
            late = [child.spec.name for child in self.children if not child.look_for_ready()]
            tick()
            if not late:
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(late)} not ready after {timeout:g} s")
            time.sleep(_POLL_SECONDS)
        return False

    def stop(self, groups: Sequence[str], timeout: float) -> list[str]:
        """Stops children role by role, in the order of `groups`; those of a role together.

        Returns the names of those that had to be killed. Kills all that is left if interrupted.
        """
        killed: list[str] = []
        try:
            for role in groups:
                members = [child for child in self.children if child.spec.role == role]
                for child in members:
                    if child.process.poll() is None:
                        child.process.terminate()
                deadline = time.monotonic() + timeout
                killed += [
                    child.spec.name for child in members if not child.stop(max(0.0, deadline - time.monotonic()))
                ]
        finally:
            for child in self.children:
                if child.process.poll() is None:
                    child.kill()
        return killed
