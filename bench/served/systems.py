"""The systems that are measured, each behind the load generator's `Backend`: token ids in, tokens out, greedy."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from offline.local import LocalBackend
from pagewire.benchmark.backend import Backend, Delta, Served, Usage
from pagewire.benchmark.datasets import Sample
from pagewire.benchmark.grpc_backend import GrpcBackend
from pagewire.config import engine_options
from pagewire.sampling import SamplingParams
from router.request import GenerateCall, Piece, Summary, TokenPrompt

ASKED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
_LOG_TAIL = 2000


class SystemFailed(Exception):
    """It did not start; the message has its log's end."""


@asynccontextmanager
async def engine(model: Path, **options: Any) -> AsyncIterator[Backend]:
    """One engine in this process, on all cores, with the router's pipeline around it and no network."""
    backend = LocalBackend.load(engine_options(model=str(model), **options))
    await backend.begin()
    try:
        yield _InProcess(backend)
    finally:
        await backend.end()


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL:]


@asynccontextmanager
async def up(model: Path, log: Path, *flags: str) -> AsyncIterator[Backend]:
    """`pagewire up` with these flags, asked through its router."""
    command = (sys.executable, "-m", "pagewire", "up", "--model", str(model), "--port", "0", *flags)
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        word, _, rest = (await process.stdout.readline()).decode().partition(" ")
        if word != "ready":
            raise SystemFailed(f"pagewire up {' '.join(flags)} did not start:\n{tail(log)}")
        backend = GrpcBackend(rest.split()[0], "", ASKED, {})
        try:
            await backend.open()
            yield backend
        finally:
            await backend.close()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


class _InProcess:
    """A pipeline of this process as the load generator sees servers."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def open(self) -> Served:
        return Served(self._backend.model.name, self._backend.max_model_len, self._backend.model.vocab_size)

    async def stream(self, sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        if not isinstance(sample.prompt, tuple):
            raise TypeError("prompts are token ids here")
        sampling = SamplingParams(max_tokens=sample.output_len, **ASKED)
        call = GenerateCall(TokenPrompt(sample.prompt), sampling, client_request_id=request_id)
        async with aclosing(self._backend.generate(call)) as outputs:
            async for output in outputs:
                if isinstance(output, Piece):
                    yield Delta(bool(output.token_ids), output.text)
                elif isinstance(output, Summary):
                    usage = Usage(output.prompt_tokens, output.completion_tokens, output.cached_tokens)
                    yield Delta(usage=usage)

    async def close(self) -> None:
        """The engine is closed by who made it."""
