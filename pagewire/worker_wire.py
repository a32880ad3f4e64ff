"""Between protobuf and plain data for what both workers are asked and answer: requests, tokens, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pagewire.errors import InvalidArgument, NotFound
from pagewire.sampling import SamplingParams
from pagewire.trace import trace_id
from pagewire.v1 import types_pb2
from pagewire.wire import MAX_WORKER_LOGPROBS, sampling_from_proto, validate_sampling
from pagewire.worker_view import AdapterLabel, PrefixSource, WorkerDescription
from pagewire.worker_view_wire import label_from_proto, request_sources_from_proto

_FINISH_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "abort": types_pb2.FINISH_REASON_ABORT,
}
MAX_REQUEST_ID_LENGTH = 256
MAX_TENANT_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """The plain form of ChoiceState."""

    choice: int
    output_token_ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class Job:
    """The plain form of a WorkerRequest that this worker may run."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    choices: tuple[Choice, ...]
    cache_salt: str
    priority: int
    tenant: str = ""
    trace_id: str = ""
    timeout_seconds: float | None = None
    prefix_sources: tuple[PrefixSource, ...] = ()
    num_expected_tokens: int = 0
    adapter: AdapterLabel | None = None


class LogprobsLike(Protocol):
    """`engine.request.TokenLogprobs`, which this package cannot import."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class TokenLike(Protocol):
    """`engine.request.TokenOutput`, likewise."""

    @property
    def choice(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def token_id(self) -> int: ...
    @property
    def logprobs(self) -> LogprobsLike | None: ...
    @property
    def finish_reason(self) -> Enum | None: ...


def job_from_proto(message: types_pb2.WorkerRequest, worker: WorkerDescription) -> Job:
    """Checks and translates; raises InvalidArgument or NotFound. Whether it fits is the engine's to say."""
    _refuse_reserved(message)
    if message.model and message.model != worker.model:
        raise NotFound(
            f"model {message.model!r} is not served by worker {worker.worker_id!r}, which serves {worker.model!r}",
            reason="MODEL_NOT_FOUND",
            metadata={"model": message.model, "served": worker.model},
        )
    if not 0 < len(message.request_id) <= MAX_REQUEST_ID_LENGTH:
        raise InvalidArgument(
            "request.request_id", len(message.request_id), f"must have 1 … {MAX_REQUEST_ID_LENGTH} characters"
        )
    prompt = tuple(message.prompt_token_ids)
    if not prompt:
        raise InvalidArgument("request.prompt_token_ids", None, "must not be empty")
    if message.num_prompt_tokens not in (0, len(prompt)):
        raise InvalidArgument(
            "request.num_prompt_tokens",
            message.num_prompt_tokens,
            f"must be the number of prompt_token_ids, {len(prompt)}",
        )
    _check_token_ids("request.prompt_token_ids", prompt, worker.vocab_size)
    for choice in message.choices:
        _check_token_ids("request.choices.output_token_ids", choice.output_token_ids, worker.vocab_size)
    params = sampling_from_proto(message.sampling)
    validate_sampling(
        params,
        vocab_size=worker.vocab_size,
        max_model_len=worker.max_model_len,
        max_logprobs=MAX_WORKER_LOGPROBS,
    )
    return Job(
        request_id=message.request_id,
        prompt_token_ids=prompt,
        params=params,
        choices=tuple(Choice(c.choice, tuple(c.output_token_ids), c.finished) for c in message.choices),
        cache_salt=message.cache_salt,
        priority=message.priority,
        tenant=message.tenant[:MAX_TENANT_LENGTH],
        trace_id=trace_id(message.traceparent),
        timeout_seconds=message.timeout_ms / 1000 if message.timeout_ms else None,
        prefix_sources=request_sources_from_proto(message, worker),
        num_expected_tokens=message.num_expected_tokens,
        adapter=_adapter(message),
    )


def _adapter(message: types_pb2.WorkerRequest) -> AdapterLabel | None:
    if not message.HasField("adapter"):
        return None
    if not message.adapter.name:
        raise InvalidArgument("request.adapter.name", "", "must not be empty")
    return label_from_proto(message.adapter)


def _refuse_reserved(message: types_pb2.WorkerRequest) -> None:
    for name, is_set in (
        ("media", bool(message.media)),
        ("pooling", message.pooling),
    ):
        if is_set:
            raise InvalidArgument(f"request.{name}", None, "is reserved and not supported by this version")


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        position, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        raise InvalidArgument(
            f"{field}[{position}]", token_id, f"must be a token id below the vocabulary size of {vocab_size}"
        )


def logprobs_to_proto(logprobs: LogprobsLike) -> types_pb2.TokenLogprobs:
    """As it travels."""
    return types_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[types_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


class PromptLogprobsLike(Protocol):
    """`engine.request.PromptLogprobs`, likewise."""

    @property
    def start(self) -> int: ...
    @property
    def entries(self) -> Sequence[LogprobsLike]: ...


def prompt_logprobs_to_proto(found: PromptLogprobsLike) -> types_pb2.PromptLogprobs:
    """As it travels."""
    return types_pb2.PromptLogprobs(start=found.start, entries=[logprobs_to_proto(entry) for entry in found.entries])


def finish_to_proto(reason: Enum | None) -> types_pb2.FinishReason.ValueType:
    """FINISH_REASON_UNSPECIFIED for None."""
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason.value]


def token_to_proto(token: TokenLike) -> types_pb2.TokenOutput:
    """As it travels."""
    return types_pb2.TokenOutput(
        choice=token.choice,
        index=token.index,
        token_id=token.token_id,
        logprobs=None if token.logprobs is None else logprobs_to_proto(token.logprobs),
        finish_reason=finish_to_proto(token.finish_reason),
    )
