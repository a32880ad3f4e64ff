"""The Shepherd Model Gateway as it comes from PyPI, as a child process in front of our gRPC endpoints."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx2
import pytest

from tests.ports import free_port

START_SECONDS = 180


class SmgGateway:
    """`smg launch` with the given arguments for its workers. Use as a context manager; `url` ends before /v1.

    `is_broken`: it is ready once it answers requests, however.
    """

    def __init__(self, *worker_arguments: str, is_broken: bool = False) -> None:
        smg = Path(sys.executable).with_name("smg")
        if not smg.exists():
            pytest.skip("smg has no wheel for this machine")
        self._good = (200, 400) if is_broken else (200,)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            str(smg), "launch", *worker_arguments, "--host", "127.0.0.1",
            "--port", str(port), "--prometheus-port", str(free_port()), "--disable-retries", "--log-level", "warn",
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "SmgGateway":
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.log()
                self.__exit__(None, None, None)
                raise AssertionError(f"smg did not become ready:\n{log[-3000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Not SIGTERM: it would keep listening for five seconds more, for load balancers that nobody has here."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def log(self) -> str:
        """What it wrote so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _is_ready(self) -> bool:
        """It knows the model once its workers have told it everything, and its tokenizer a moment later."""
        try:
            models = httpx2.get(f"{self.url}/v1/models", timeout=20)
            if models.status_code != 200 or not models.json()["data"]:
                return False
            body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
            return httpx2.post(f"{self.url}/v1/completions", json=body, timeout=30).status_code in self._good
        except httpx2.TransportError:
            return False
