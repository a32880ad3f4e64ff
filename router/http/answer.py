"""One HTTP request's answer: its calls of the pipeline, run side by side, as one object or as a stream of chunks."""

import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import ASGIApp

from pagewire.errors import PagewireError, renamed
from router.backend import Backend
from router.http.merge import merge
from router.http.responses import EventAnswer, Json, JsonAnswer
from router.request import FinishReason, GenerateCall, Piece, PromptLogprobs, Summary

_STRUCTURE = re.compile(r"^sampling\.structured_output(\.\w+)?")
FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class Form(Protocol):
    """How an endpoint shows a choice. `number` counts the choices of all prompts."""

    @property
    def whole_object(self) -> str:
        """`object` of an answer that is no stream."""

    @property
    def chunk_object(self) -> str:
        """`object` of a chunk."""

    @property
    def return_token_ids(self) -> bool:
        """Chunks show token ids, so that tokens without text have chunks too."""

    def prompt(self, number: int, found: PromptLogprobs) -> None:
        """Takes the log-probabilities of the prompt whose first choice is `number`; they come before any output."""

    def openings(self, number: int) -> list[Json]:
        """The choice in chunks that come before its first output."""

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """The choice in a chunk of the stream, if the piece shows anything."""

    def whole(self, number: int, piece: Piece) -> Json:
        """The choice in an answer that is no stream; the piece is all of its output."""

    def fields(self) -> Json:
        """Of the whole answer."""


@dataclass(slots=True)
class _Usage:
    counts_output: bool = True
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, summary: Summary) -> None:
        self.prompt_tokens += summary.prompt_tokens
        self.completion_tokens += summary.completion_tokens if self.counts_output else 0
        self.cached_tokens += summary.cached_tokens

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """`calls` are of one endpoint, one for each prompt; `extra` goes into the first chunk, or the one answer."""

    pipeline: Backend
    answer_id: str
    calls: Sequence[GenerateCall]
    form: Form
    include_usage: bool = False
    extra: Json = field(default_factory=dict)
    is_stream: bool = False
    # The client's name of what became the structured output.
    structure_name: str = ""
    # What is drawn is not shown, and does not count.
    only_prompt: bool = False

    def response(self) -> ASGIApp:
        """What the endpoint returns."""
        headers = {"x-request-id": self.answer_id}
        return EventAnswer(self.chunks(), headers) if self.is_stream else JsonAnswer(self.whole, headers)

    async def whole(self) -> Json:
        """Everything at once. Raises PagewireError."""
        usage, choices = self._usage(), dict[int, Piece]()
        async with aclosing(self._outputs()) as outputs:
            async for number, output in outputs:
                if isinstance(output, Summary):
                    usage.add(output)
                elif isinstance(output, PromptLogprobs):
                    self.form.prompt(number, output)
                elif number in choices:
                    choices[number].extend(output)
                else:
                    choices[number] = output
        return {
            **self._envelope(self.form.whole_object),
            "choices": [self.form.whole(number, piece) for number, piece in sorted(choices.items())],
            "usage": usage.as_json(),
            **self.form.fields(),
            **self.extra,
        }

    async def chunks(self) -> AsyncGenerator[Json]:
        """Chunks as they come, then the usage if wanted. Raises PagewireError."""
        envelope = self._envelope(self.form.chunk_object)
        if self.include_usage:
            envelope["usage"] = None
        usage, begun, extra = self._usage(), set[int](), self.extra
        async with aclosing(self._outputs()) as outputs:
            async for number, output in outputs:
                if isinstance(output, Summary):
                    usage.add(output)
                    continue
                if isinstance(output, PromptLogprobs):
                    self.form.prompt(number, output)
                    continue
                if number not in begun:
                    begun.add(number)
                    for opening in self.form.openings(number):
                        yield {**envelope, "choices": [opening], **extra}
                        extra = {}
                has_news = output.text or output.logprobs or self.form.return_token_ids
                if not has_news and output.finish_reason is None:
                    continue
                if (choice := self.form.chunk(number, output)) is not None:
                    yield {**envelope, "choices": [choice], **extra}
                    extra = {}
        if self.include_usage:
            yield {**envelope, "choices": [], "usage": usage.as_json()}

    async def _outputs(self) -> AsyncGenerator[tuple[int, Piece | PromptLogprobs | Summary]]:
        """With the number of the choice among those of all prompts."""
        num_choices = self.calls[0].sampling.n
        try:
            async with aclosing(merge([self.pipeline.generate(call) for call in self.calls])) as outputs:
                async for output in outputs:
                    first = output.stream * num_choices
                    if isinstance(output.item, Piece):
                        yield first + output.item.choice, output.item
                    elif isinstance(output.item, Summary | PromptLogprobs):
                        yield first, output.item
        except PagewireError as error:
            if not self.structure_name:
                raise
            raise renamed(error, _STRUCTURE, self.structure_name) from None

    def _usage(self) -> "_Usage":
        return _Usage(counts_output=not self.only_prompt)

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.calls[0].model or self.pipeline.model.name,
        }
