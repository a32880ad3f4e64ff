"""Starts `pagewire` processes by forking one that has imported everything, which costs 3 s of CPU otherwise.

What is forked differs from a started process only in that its modules are there: nothing of pagewire has run in the
zygote, which has no thread, socket or random state that a child could share (gRPC and torch start theirs on first use).
"""

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.01
MODULES = (
    "pagewire.cli.app",
    "pagewire.cli.services",
    "router.main",
    "prefill_svc.main",
    "decode_svc.main",
    "engine.kernel_set",
    "engine.models.registry",
    "engine.parallel.part",
    "engine.runner",
    "engine.sampler",
    "engine.weights",
    "kernels.reference",
    "transformers.models.auto",
)


class Zygote:
    """The process that forks; thread-safe. `close` kills what it has started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, arguments: list[str], out: Path, log: Path) -> "Child":
        """`pagewire ARGUMENTS` with stdout in `out` and stderr added to `log`."""
        return Child(self, self._ask({"start": arguments, "out": str(out), "log": str(log)}))

    def start_rank(self, rank: int, address: str, token: bytes, out: Path, log: Path) -> "Child":
        """What `python -m engine.parallel.rank` does, over a socket with a name."""
        where = {"rank": rank, "address": address, "token": token.hex()}
        return Child(self, self._ask({"start": [], "rank": where, "out": str(out), "log": str(log)}))

    def exit_code(self, pid: int) -> int | None:
        """None while it runs; negative for a signal, as in subprocess."""
        code = self._ask({"pid": pid})
        return None if code is None else int(code)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


class Child:
    """What subprocess.Popen would be."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._zygote.exit_code(self.pid)
        return self._code

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve() -> None:
    """Answers one line with one line, until nobody asks any more."""
    children: dict[int, int | None] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            if not (pid := os.fork()):
                _become(**question)
            children[pid] = None
            print(pid, flush=True)
            continue
        pid = question["pid"]
        if children[pid] is None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            children[pid] = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(children[pid]), flush=True)
    for pid, code in children.items():
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _become(start: list[str], out: str, log: str, rank: dict[str, Any] | None = None) -> None:
    """In the child: never returns."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.closerange(3, 64)
    random.seed()
    if rank is not None:
        from engine.parallel.named_socket import connect_rank
        from engine.parallel.rank import run_rank

        run_rank(connect_rank(rank["address"], bytes.fromhex(rank["token"]), rank["rank"]), rank["rank"])
        os._exit(0)
    sys.argv = ["pagewire", *start]
    from pagewire.cli import main

    main()  # its SystemExit ends this process as it would any other


if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(module)
    _serve()
