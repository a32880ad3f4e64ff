"""What the load generator asks of a server, whatever it speaks."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from pagewire.benchmark.datasets import Sample


class SendError(Exception):
    """A request that failed. `code` groups failures: a gRPC code's name, "HTTP 429", or what the transport says."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind a server; None is what it does not tell."""

    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; None is what a server does not tell."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """One message of a stream; `has_tokens` if it is what a client waits for."""

    has_tokens: bool = False
    text: str = ""
    usage: Usage | None = None


class Backend(Protocol):
    """Open it, use it and close it on one event loop."""

    async def open(self) -> Served:
        """The model to ask. May be called again after a SendError."""

    def stream(self, sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        """Sends one request. Raises SendError, also when the stream ends before its last message."""

    async def close(self) -> None: ...
