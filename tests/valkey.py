"""Real servers for tests: embedded Valkey, Debian's redis-server when installed; killable, restartable, pausable."""

import shutil
from types import TracebackType

import redis

from kvstore.embedded_valkey import EmbeddedValkey
from tests.ports import free_port

PROGRAMS = ["valkey", "redis-server"]


def is_installed(program: str) -> bool:
    """True for the embedded Valkey, and for a server in PATH."""
    return program == "valkey" or shutil.which(program) is not None


class Server:
    """A server that keeps its port over kills and restarts. A context manager: nothing is left behind."""

    def __init__(self, program: str = "valkey", arguments: tuple[str, ...] = ()) -> None:
        self._program = None if program == "valkey" else [program]
        self._arguments = arguments
        self._process = EmbeddedValkey.start(free_port(), program=self._program, arguments=arguments)
        self.port = self._process.port
        self.url = self._process.url

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.stop()

    def kill(self) -> None:
        """SIGKILL: everything it knew is lost."""
        self._process.kill()
        self._process.stop()

    @property
    def pid(self) -> int:
        """Of the server itself, for SIGSTOP and SIGCONT."""
        return self._process.pid

    def restart(self) -> None:
        """An empty server on the same port."""
        self._process = EmbeddedValkey.start(self.port, program=self._program, arguments=self._arguments)

    def fill(self, size: int) -> int:
        """Sets values of so many bytes until the server's maxmemory is reached; returns how many there are then."""
        for number in range(100_000):
            try:
                self.command("SET", f"theirs{number}", b"x" * size)
            except redis.OutOfMemoryError:
                return number
        raise AssertionError("the server has no limit")

    def command(self, *words: str | bytes | int) -> object:
        """Runs one command on a connection of its own."""
        with redis.Redis(port=self.port, protocol=2) as client:
            return client.execute_command(*words)
