"""What a generation gives back, as plain data: chunks while it runs, a completion at its end."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagewire.errors import Internal
from pagewire.v1 import inference_pb2, types_pb2

_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one output token; `top` is (token id, logprob), best first; `rank` 1 = likeliest."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds since the request arrived at the router."""

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice's output, or the request's last message (`done`), which alone has usage and timing.

    `index` is the output position of token_ids[0]; `finish_reason` ("stop", "length", "abort") is set on the choice's
    last piece. `prompt_logprobs` come in chunks of their own, of the prompt's tokens (`prompt_token_ids`) from
    `prompt_logprobs_start` on.
    """

    request_id: str = ""
    choice: int = 0
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str = ""
    seed: int = 0
    done: bool = False
    usage: Usage | None = None
    timing: Timing | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 0
    beam_score: float | None = None
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """All of one choice's output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str
    logprobs: tuple[TokenLogprobs, ...]
    beam_score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole request; `text`, `token_ids`, `finish_reason` and `logprobs` are the first choice's.

    `prompt_logprobs` are of the prompt's tokens from the second on.
    """

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prefill_worker: str
    decode_worker: str
    seed: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs


def chunk_from_proto(message: inference_pb2.GenerateResponse) -> Chunk:
    """The plain form of one response."""
    usage, timing = message.usage, message.timing
    return Chunk(
        request_id=message.request_id,
        choice=message.choice,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        finish_reason=_REASONS.get(message.finish_reason),
        stop_reason=message.stop_reason,
        seed=message.seed,
        done=message.done,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if message.done else None,
        timing=Timing(timing.queue_ms, timing.ttft_ms, timing.total_ms) if message.done else None,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        prompt_logprobs_start=message.prompt_logprobs_start,
        beam_score=message.beam_score if message.HasField("beam_score") else None,
        prompt_token_ids=tuple(message.prompt_token_ids),
    )


def _logprobs(entries: Iterable[types_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(entry.logprob, entry.rank, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in entries
    )


@dataclass(slots=True)
class _GrowingChoice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str = ""
    beam_score: float | None = None


class CompletionBuilder:
    """Folds chunks into a completion."""

    def __init__(self) -> None:
        self._choices: dict[int, _GrowingChoice] = {}
        self._last: Chunk | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk."""
        if chunk.done:
            self._last = chunk
        if chunk.done and not (chunk.text or chunk.token_ids or chunk.finish_reason):
            return
        if chunk.prompt_logprobs:
            self._prompt_logprobs.extend(chunk.prompt_logprobs)
            return
        choice = self._choices.setdefault(chunk.choice, _GrowingChoice())
        choice.text.append(chunk.text)
        choice.token_ids.extend(chunk.token_ids)
        choice.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            choice.finish_reason = chunk.finish_reason
            choice.stop_reason = chunk.stop_reason
            choice.beam_score = chunk.beam_score

    def build(self) -> Completion:
        """The completion; raises Internal if the stream ended before its last message."""
        last = self._last
        if last is None or not self._choices:
            raise Internal("the stream ended before its last message")
        return Completion(
            request_id=last.request_id,
            choices=tuple(
                Choice(
                    "".join(choice.text),
                    tuple(choice.token_ids),
                    choice.finish_reason,
                    choice.stop_reason,
                    tuple(choice.logprobs),
                    choice.beam_score,
                )
                for _, choice in sorted(self._choices.items())
            ),
            usage=last.usage or Usage(),
            timing=last.timing or Timing(),
            prefill_worker=last.prefill_worker,
            decode_worker=last.decode_worker,
            seed=last.seed,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
