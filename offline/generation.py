"""Many calls of a backend, a bounded number of them at a time, each to its end."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagewire.errors import Internal, PagewireError
from pagewire.text.tokenizer import Tokenizer
from pagewire.token_progress import TokenProgress
from pagewire.worker_view import AdapterLabel
from router.backend import Backend
from router.request import (
    ChatPrompt,
    FinishReason,
    GenerateCall,
    Logprobs,
    Piece,
    PromptLogprobs,
    Summary,
    TextPrompt,
    TokenPrompt,
)
from router.validate import resolve_max_tokens, validate_call, validate_length

T = TypeVar("T")
R = TypeVar("R")

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class OfflineBackend(Backend, Protocol):
    """A backend with a beginning and an end, both on the event loop that uses it."""

    num_in_flight: int
    """Requests to have running or waiting there at a time."""

    @property
    def adapters(self) -> Mapping[str, AdapterLabel]:
        """LoRA adapters that requests may name."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: token ids cannot be shown as text."""

    async def begin(self) -> None: ...

    async def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call whose prompt is token ids, and the prompt as text if it was any."""

    call: GenerateCall
    text: str | None
    token_ids: tuple[int, ...]


async def answer_all(
    backend: OfflineBackend, calls: Sequence[GenerateCall], progress: TokenProgress
) -> list[RequestOutput]:
    """One output for each call, in their order. Raises PagewireError, for a bad call before any is begun."""

    async def prepare(number: int, call: GenerateCall) -> _Prepared:
        try:
            return await _prepare(backend, call)
        except PagewireError as error:
            raise _in_prompt(number, len(calls), error) from None

    async def answer(number: int, prepared: _Prepared) -> RequestOutput:
        try:
            output = await _answer(backend, prepared, progress)
        except PagewireError as error:
            raise _in_prompt(number, len(calls), error) from None
        progress.finished()
        return output

    prepared = await _map(prepare, calls, backend.num_in_flight)
    return await _map(answer, prepared, backend.num_in_flight)


async def _prepare(backend: OfflineBackend, call: GenerateCall) -> _Prepared:
    """All that can be found wrong before anything runs, is found here."""
    limit = backend.max_model_len
    validate_call(call, backend.model, max_model_len=limit, adapters=backend.adapters)
    prompt = call.prompt
    most = call.sampling.max_tokens
    token_ids = await backend.tokenize(prompt, truncate_prompt_tokens=call.truncate_prompt_tokens, max_tokens=most)
    validate_length("prompt", len(token_ids), limit)
    resolve_max_tokens(most, num_prompt_tokens=len(token_ids), max_model_len=limit, fits=limit)
    text = prompt.text if isinstance(prompt, TextPrompt) else None
    if isinstance(prompt, ChatPrompt):
        text = await backend.detokenize(token_ids, skip_special_tokens=False)
    return _Prepared(replace(call, prompt=TokenPrompt(token_ids), truncate_prompt_tokens=None), text, token_ids)


async def _answer(backend: OfflineBackend, prepared: _Prepared, progress: TokenProgress) -> RequestOutput:
    pieces: dict[int, Piece] = {}
    tokenizer = backend.tokenizer
    prompt_logprobs: list[Mapping[int, Logprob] | None] = [None]
    summary: Summary | None = None
    async with aclosing(backend.generate(prepared.call)) as outputs:
        async for output in outputs:
            if isinstance(output, Summary):
                summary = output
            elif isinstance(output, PromptLogprobs):
                pairs = zip(output.token_ids, output.entries, strict=True)
                prompt_logprobs += [_position(*pair, tokenizer) for pair in pairs]
            elif isinstance(output, Piece):
                progress.tokens(len(output.token_ids))
                if output.choice in pieces:
                    pieces[output.choice].extend(output)
                else:
                    pieces[output.choice] = output
    if summary is None:
        raise Internal("the output ended before its summary")
    return RequestOutput(
        prepared.call.client_request_id,
        prepared.text,
        list(prepared.token_ids),
        [_completion(piece, prepared.call, tokenizer) for _, piece in sorted(pieces.items())],
        True,
        _metrics(summary, time.time()),
        summary.cached_tokens,
        None if prepared.call.sampling.prompt_logprobs is None else prompt_logprobs,
    )


def _completion(piece: Piece, call: GenerateCall, tokenizer: Tokenizer | None) -> CompletionOutput:
    logprobs: list[Mapping[int, Logprob]] | None = None
    total: float | None = None
    if call.sampling.logprobs is not None:
        logprobs = [_position(*pair, tokenizer) for pair in zip(piece.token_ids, piece.logprobs, strict=True)]
        total = sum(item.logprob for item in piece.logprobs)
    stop_reason: int | str | None = piece.stop_reason or None
    if stop_reason is None and piece.finish_reason is FinishReason.STOP:
        last = piece.token_ids[-1]
        stop_reason = last if last in call.sampling.stop_token_ids else None
    finish = None if piece.finish_reason is None else _FINISH[piece.finish_reason]
    return CompletionOutput(piece.choice, piece.text, piece.token_ids, total, logprobs, finish, stop_reason)


def _position(token_id: int, item: Logprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    def entry(candidate: int, logprob: float, rank: int) -> Logprob:
        text = None if tokenizer is None else tokenizer.token_bytes(candidate).decode(errors="replace")
        return Logprob(logprob, rank, text)

    chosen = {token_id: entry(token_id, item.logprob, item.rank)}
    likeliest = {other: entry(other, logprob, rank) for rank, (other, logprob) in enumerate(item.top, start=1)}
    return chosen | likeliest | chosen


def _metrics(summary: Summary, now: float) -> RequestMetrics:
    arrival = now - summary.total_ms / 1e3
    queued = summary.queue_ms / 1e3
    return RequestMetrics(arrival, arrival + queued, arrival + summary.ttft_ms / 1e3, now, queued)


def _in_prompt(number: int, count: int, error: PagewireError) -> PagewireError:
    if count > 1:
        error.message = f"prompts[{number}]: {error.message}"
        error.args = (error.message,)
    return error


async def _map(function: Callable[[int, T], Awaitable[R]], items: Sequence[T], limit: int) -> list[R]:
    """`function(number, item)` of each, at most `limit` at a time, begun in order. The first error cancels the rest."""
    results: dict[int, R] = {}
    left = iter(enumerate(items))

    async def work() -> None:
        for number, item in left:
            results[number] = await function(number, item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(items))):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in range(len(items))]
