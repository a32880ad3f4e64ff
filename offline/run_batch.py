"""`pagewire run-batch`: a file of requests in OpenAI's batch format, answered line by line; it can be run again."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from offline.batch_file import (
    BadLine,
    BatchOutput,
    BatchRequest,
    count_lines,
    digest,
    numbered_lines,
    parse_line,
    refuse_same_file,
)
from offline.generation import OfflineBackend
from offline.remote import RemoteBackend, is_transient
from pagewire.config import EngineOptions
from pagewire.errors import InvalidArgument, PagewireError
from pagewire.text.tokenizer import Tokenizer
from pagewire.token_progress import TokenProgress, token_progress
from router.http.chat import ChatCompletions
from router.http.completions import Completions
from router.http.errors import error_body, error_response, known_error
from router.http.responses import Json


@dataclass(slots=True)
class Totals:
    """What a run did; `num_known` had been answered by an earlier one."""

    num_ok: int = 0
    num_failed: int = 0
    num_known: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> str:
        """One line."""
        before = f", {self.num_known} answered before" if self.num_known else ""
        rate = self.num_output_tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.num_ok + self.num_failed} requests: {self.num_ok} ok, {self.num_failed} failed{before}; "
            f"{self.num_prompt_tokens} prompt and {self.num_output_tokens} output tokens in {self.seconds:.1f} s "
            f"({rate:,.0f} tokens/s)"
        )


def open_local(options: EngineOptions) -> OfflineBackend:
    """An engine in this process. Raises ConfigError or another ValueError."""
    from engine.errors import EngineError
    from offline.local import LocalBackend
    from offline.model_source import with_directory

    try:
        return LocalBackend.load(with_directory(options))
    except EngineError as error:
        raise ValueError(str(error)) from error


def open_remote(target: str, tokenizer: Path | None, num_in_flight: int, security: dict[str, Any]) -> OfflineBackend:
    """A running system. Raises TokenizerError."""
    own = None if tokenizer is None else Tokenizer.load(tokenizer)
    return RemoteBackend(target, tokenizer=own, num_in_flight=num_in_flight, **security)


def run_batch(source: Path, out: Path, open_backend: Callable[[], OfflineBackend], *, model_name: str = "") -> None:
    """Answers what `out` has no answer to yet, and prints a summary, also when it could not go on.

    `model_name` is accepted as the requests' model besides the served name. Raises OSError, NotABatchOutput,
    PagewireError, and what `open_backend` raises.
    """
    refuse_same_file(source, out)
    num_lines = count_lines(source)
    with BatchOutput(out) as output:
        backend = open_backend()
        totals, started_at = Totals(), time.monotonic()
        with token_progress(num_lines, shown=True) as progress:
            try:
                asyncio.run(_Run(backend, output, totals, progress, model_name).all_of(source))
            except BaseException:
                print("not complete; the same command goes on from here", file=sys.stderr)
                raise
            finally:
                totals.seconds = time.monotonic() - started_at
                print(totals.summary(), flush=True)


class _Run:
    def __init__(
        self, backend: OfflineBackend, output: BatchOutput, totals: Totals, progress: TokenProgress, model_name: str
    ) -> None:
        self._backend = backend
        self._output = output
        self._totals = totals
        self._progress = progress
        self._model_name = model_name
        self._seen: set[bytes] = set()
        self._endpoints: dict[str, ChatCompletions | Completions] = {}

    async def all_of(self, source: Path) -> None:
        """Reads on when a request has ended, so that a huge file is never in memory."""
        await self._backend.begin()
        try:
            # Only now is the model known.
            self._endpoints = {
                "/v1/chat/completions": ChatCompletions(self._backend),
                "/v1/completions": Completions(self._backend),
            }
            with source.open("rb") as file:
                lines = numbered_lines(file)
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(self._backend.num_in_flight):
                            group.create_task(self._work(lines))
                except BaseExceptionGroup as errors:
                    raise errors.exceptions[0] from None
        finally:
            await self._backend.end()

    async def _work(self, lines: Iterator[tuple[int, bytes | None]]) -> None:
        for number, line in lines:
            try:
                request = self._take(line)
            except BadLine as bad:
                if number not in self._output.answered.bad_lines:
                    self._write_bad(number, bad)
            else:
                if request is not None:
                    self._write(request, *await self._answer(request))
            self._progress.finished()
            # Lines that are skipped must not keep the others waiting.
            await asyncio.sleep(0)

    def _take(self, line: bytes | None) -> BatchRequest | None:
        """The request, or None if it has its answer. Raises BadLine."""
        request = parse_line(line)
        key = digest(request.custom_id)
        if key in self._seen:
            raise BadLine("duplicate_custom_id", "an earlier line has the same custom_id", request.custom_id)
        self._seen.add(key)
        if key in self._output.answered.custom_ids:
            self._totals.num_known += 1
            return None
        if request.url not in self._endpoints:
            message = f"url = {request.url[:80]!r}: must be one of {', '.join(self._endpoints)}"
            raise BadLine("invalid_url", message, request.custom_id)
        return request

    async def _answer(self, request: BatchRequest) -> tuple[int, str, Json]:
        """(HTTP status, request id, body). Raises PagewireError if the system is gone: then the run can't go on."""
        body = dict(request.body)
        if self._model_name and body.get("model") == self._model_name:
            body["model"] = self._backend.model.name
        answer_id = ""
        try:
            self._check(body)
            answer = await self._endpoints[request.url].answer(body, {})
            answer_id = answer.answer_id
            return 200, answer_id, await answer.whole()
        except Exception as error:
            if isinstance(error, PagewireError) and is_transient(error):
                raise
            known = known_error(error, request.url)
            return error_response(known).status_code, answer_id, error_body(known)

    def _check(self, body: Json) -> None:
        if body.get("stream"):
            raise InvalidArgument("stream", body["stream"], "must be false in a batch")
        if self._backend.tokenizer is not None:
            return
        for field in ("logprobs", "prompt_logprobs"):
            if body.get(field) not in (None, False):
                limit = "needs the tokenizer here, to show tokens as text: give --tokenizer"
                raise InvalidArgument(field, body[field], limit)
        if body.get("tools"):
            limit = "need the tokenizer here, whose chat template says how calls are written: give --tokenizer"
            raise InvalidArgument("tools", None, limit)

    def _write(self, request: BatchRequest, status: int, request_id: str, body: Json) -> None:
        totals = self._totals
        totals.num_ok += status == 200
        totals.num_failed += status != 200
        usage = body.get("usage")
        if isinstance(usage, dict):
            totals.num_prompt_tokens += usage["prompt_tokens"]
            totals.num_output_tokens += usage["completion_tokens"]
            self._progress.tokens(usage["completion_tokens"])
        response: Json = {"status_code": status, "request_id": request_id or uuid4().hex, "body": body}
        self._output.append(_record(request.custom_id, response, None))

    def _write_bad(self, number: int, bad: BadLine) -> None:
        self._totals.num_failed += 1
        error: Json = {"code": bad.code, "message": f"line {number}: {bad.message}", "line": number}
        self._output.append(_record(bad.custom_id, None, error))


def _record(custom_id: str | None, response: Json | None, error: Json | None) -> Json:
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
