"""A running system as a backend: the same calls, over the Python client."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, cast

import grpc
from google.rpc import error_details_pb2

from pagewire.client import AsyncClient
from pagewire.completion import Chunk
from pagewire.errors import InvalidArgument, NotFound, PagewireError
from pagewire.sampling import SamplingParams
from pagewire.text.chat_template import ChatTemplateError
from pagewire.text.tokenizer import Tokenizer
from pagewire.worker_view import AdapterLabel
from router.backend import Output, Started
from router.model import ModelFacts
from router.request import (
    BeamSearch,
    ChatPrompt,
    FinishReason,
    GenerateCall,
    Logprobs,
    Piece,
    Prompt,
    PromptLogprobs,
    Summary,
    TextOptions,
    TextPrompt,
    TokenPrompt,
)
from router.validate import message_fields, template_variables, tools_of, truncated

PATIENCE_SECONDS = 120.0
"""How long a request is sent again to a system that is full or gone, since its first failure."""
_LONGEST_PAUSE = 5.0
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_SENT = frozenset({"prompt", "sampling", "text_options", "model", "cache_salt", "priority", "client_request_id",
                   "truncate_prompt_tokens", "best_of", "beam_search"})  # fmt: skip
_SENT_TEXT_OPTIONS = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens", "bad_words"})


class RemoteBackend:
    """Make it anywhere, use it on one event loop: `begin`, then requests, then `end`.

    A request's pieces come when all of it is there: until then it can be sent anew to a system that was full or lost.
    """

    def __init__(
        self,
        target: str,
        *,
        tokenizer: Tokenizer | None = None,
        num_in_flight: int = 64,
        patience_seconds: float = PATIENCE_SECONDS,
        **security: Any,
    ) -> None:
        """`security` is Client's. Without `tokenizer` no token ids can be shown as text."""
        self._target = target
        self._security = security
        self._tokenizer = tokenizer
        self._patience = patience_seconds
        self._client: AsyncClient | None = None
        self._model: ModelFacts | None = None
        self.num_in_flight = num_in_flight
        self.adapters: Mapping[str, AdapterLabel] = {}
        """Those there were at `begin`, by name."""

    async def begin(self) -> None:
        """Connects. Raises PagewireError."""
        self._client = AsyncClient(self._target, **self._security)
        try:
            info, *adapters = await self._client.list_models(timeout=30.0)
        except BaseException:
            await self.end()
            raise
        # Nobody asks a tokenizer that isn't there for more than this.
        tokenizer = self._tokenizer or cast(Tokenizer, _NoTokenizer(info.has_chat_template))
        self._model = ModelFacts(info.name, tokenizer, info.vocab_size, info.max_model_len)
        self.adapters = {each.name: AdapterLabel(each.name, b"", 0) for each in adapters}

    async def end(self) -> None:
        """Ends the connection; requests that run are cancelled."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def model(self) -> ModelFacts:
        if self._model is None:
            raise RuntimeError("begin() was not called")
        return self._model

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The one that was given."""
        return self._tokenizer

    async def tokenize(
        self,
        prompt: Prompt | None,
        *,
        truncate_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        tenant: str | None = None,
    ) -> tuple[int, ...]:
        """Token ids as the system would have them."""
        token_ids = await self._tokenize(prompt)
        return truncated(token_ids, truncate_prompt_tokens, max_tokens, self.max_model_len)

    async def _tokenize(self, prompt: Prompt | None) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        if isinstance(prompt, ChatPrompt):
            return tuple(await self._connected.tokenize(**_chat(prompt)))
        if isinstance(prompt, TextPrompt):
            ids = await self._connected.tokenize(prompt.text, add_special_tokens=prompt.add_special_tokens)
            return tuple(ids)
        raise InvalidArgument("prompt", None, "is missing")

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids that begin a text."""
        return await self._connected.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def generate(self, call: GenerateCall, *, seconds_left: float | None = None) -> AsyncGenerator[Output]:
        """As Pipeline's. Raises PagewireError."""
        _refuse_what_is_not_sent(call)
        asked = _asked(call)
        if isinstance(call.prompt, TextPrompt) and not call.prompt.add_special_tokens:
            asked["prompt"] = await self.tokenize(call.prompt)
        failed_at, pause = None, 0.2
        while True:
            try:
                chunks = [chunk async for chunk in self._connected.generate(timeout=seconds_left, **asked)]
                break
            except PagewireError as error:
                now = time.monotonic()
                failed_at = now if failed_at is None else failed_at
                if not is_transient(error) or now - failed_at > self._patience:
                    raise
                pause = min(_LONGEST_PAUSE, max(2 * pause, _retry_seconds(error)))
                await asyncio.sleep(pause)
        for output in _outputs(chunks):
            yield output

    @property
    def _connected(self) -> AsyncClient:
        if self._client is None:
            raise RuntimeError("begin() was not called")
        return self._client


def is_transient(error: PagewireError) -> bool:
    """It says nothing of the request: the system is full, or not there."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return True
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and _retry_seconds(error) > 0


def _retry_seconds(error: PagewireError) -> float:
    for detail in error.details:
        if isinstance(detail, error_details_pb2.RetryInfo):
            return float(detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9)
    return 0.0


def _asked(call: GenerateCall) -> dict[str, Any]:
    """The client's arguments."""
    prompt = call.prompt
    if isinstance(prompt, ChatPrompt):
        asked = _chat(prompt)
    else:
        asked = {"prompt": prompt.token_ids if isinstance(prompt, TokenPrompt) else prompt and prompt.text}
    return {
        **asked,
        **{field.name: getattr(call.sampling, field.name) for field in fields(SamplingParams)},
        "stop": call.text_options.stop,
        "include_stop_str_in_output": call.text_options.include_stop_str_in_output,
        "skip_special_tokens": call.text_options.skip_special_tokens,
        "bad_words": call.text_options.bad_words,
        **_beams(call.beam_search),
        "truncate_prompt_tokens": call.truncate_prompt_tokens,
        "best_of": call.best_of,
        "model": call.model,
        "cache_salt": call.cache_salt,
        "priority": call.priority,
        "request_id": call.client_request_id,
    }


def _chat(prompt: ChatPrompt) -> dict[str, Any]:
    return {
        "chat": [
            {"role": role, "content": content, **more}
            for (role, content), more in zip(prompt.messages, message_fields(prompt), strict=True)
        ],
        "add_generation_prompt": prompt.add_generation_prompt,
        "chat_template_kwargs": template_variables(prompt),
        "tools": tools_of(prompt),
    }


def _beams(search: BeamSearch | None) -> dict[str, Any]:
    if search is None:
        return {}
    early = "never" if search.early_stopping is None else search.early_stopping
    return {"num_beams": search.num_beams, "length_penalty": search.length_penalty, "early_stopping": early}


def _refuse_what_is_not_sent(call: GenerateCall) -> None:
    """Nothing is dropped in silence."""
    for value, sent, default in (
        (call, _SENT, GenerateCall(call.prompt)),
        (call.text_options, _SENT_TEXT_OPTIONS, TextOptions()),
    ):
        for field in fields(value):
            if field.name not in sent and getattr(value, field.name) != getattr(default, field.name):
                raise InvalidArgument(field.name, getattr(value, field.name), "cannot be sent to a target")


def _outputs(chunks: Sequence[Chunk]) -> list[Output]:
    """The prompt's log-probabilities and one piece for each choice, between Started and Summary."""
    pieces: dict[int, Piece] = {}
    prompt: list[Output] = []
    last = chunks[-1] if chunks else Chunk()
    if not last.done or last.usage is None or last.timing is None:
        raise PagewireError("the stream ended before its last message", code=grpc.StatusCode.INTERNAL)
    for chunk in chunks:
        if chunk.done:
            continue
        if chunk.prompt_logprobs:
            entries = tuple(Logprobs(item.logprob, item.rank, item.top) for item in chunk.prompt_logprobs)
            prompt.append(PromptLogprobs(chunk.prompt_logprobs_start, chunk.prompt_token_ids, entries))
            continue
        piece = Piece(
            chunk.choice,
            chunk.index,
            chunk.text,
            list(chunk.token_ids),
            [Logprobs(item.logprob, item.rank, item.top) for item in chunk.logprobs],
            None if chunk.finish_reason is None else _FINISH[chunk.finish_reason],
            chunk.stop_reason,
            chunk.beam_score,
        )
        if chunk.choice in pieces:
            pieces[chunk.choice].extend(piece)
        else:
            pieces[chunk.choice] = piece
    usage, timing = last.usage, last.timing
    summary = Summary(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        timing.queue_ms,
        timing.ttft_ms,
        timing.total_ms,
        last.prefill_worker,
        last.decode_worker,
    )
    return [Started(last.request_id, last.seed), *prompt, *(piece for _, piece in sorted(pieces.items())), summary]


class _NoTokenizer:
    """Stands where the system's tokenizer would: knows whether there is a chat template, and refuses the rest."""

    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, has_chat_template: bool) -> None:
        self.chat_template = _NoTemplate() if has_chat_template else None

    def token_id(self, token: str) -> None:
        """No token is known."""

    def token_bytes(self, token_id: int) -> NoReturn:
        raise NotFound("the text of single tokens needs a tokenizer: give one (a model's directory)")


class _NoTemplate:
    """A chat template that only the system has; without its source nothing is known of tools and thoughts."""

    source = ""

    def render(self, messages: object, **options: object) -> NoReturn:
        raise ChatTemplateError("only the target has the chat template")
