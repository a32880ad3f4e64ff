"""`pagewire chat` at a terminal: several turns, an error that ends a turn only, /reset and /exit."""

import os
import pty
import subprocess
import sys
import time

import pytest

from tests.pagewire.router_stub import running_stub
from tests.pagewire.test_cli import ROOT


class Terminal:
    """A chat whose stdin and stdout are a pseudo-terminal."""

    def __init__(self, target: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagewire", "chat", "--target", target],
            stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(slave)
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode() + b"\n")

    def wait_for(self, text: str) -> None:
        """Reads until `text` appears after what was read before."""
        seen = ""
        deadline = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < deadline, seen
            try:
                seen += os.read(self._master, 1024).decode()
            except OSError:
                pytest.fail(f"ended early: {seen}")
        self.output += seen

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            os.close(self._master)


def test_conversation() -> None:
    with running_stub() as (target, _):
        terminal = Terminal(target)
        try:
            terminal.wait_for("> ")
            terminal.type("one")
            terminal.wait_for("1:one\r\n> ")
            terminal.type("and then")
            terminal.wait_for("3:and then\r\n> ")
            terminal.type("/reset")
            terminal.wait_for("> ")
            terminal.type("two")
            terminal.wait_for("1:two\r\n> ")
            terminal.type("/exit")
        finally:
            code = terminal.close()
        assert code == 0
        assert "/reset forgets" in terminal.output


def test_error_ends_the_turn_only() -> None:
    with running_stub() as (target, router):
        terminal = Terminal(target)
        try:
            terminal.wait_for("> ")
            router.fail_next = "queue is full"
            terminal.type("one")
            terminal.wait_for("error: RESOURCE_EXHAUSTED: queue is full\r\n> ")
            terminal.type("two")
            # One message: the failed turn was forgotten.
            terminal.wait_for("1:two\r\n> ")
            terminal.type("/exit")
        finally:
            code = terminal.close()
        assert code == 0
