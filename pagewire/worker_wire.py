"""Between protobuf and plain data for what both workers speak: requests, tokens, descriptions, loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pagewire.errors import InvalidArgument, NotFound
from pagewire.prefix_control import Holding
from pagewire.sampling import SamplingParams
from pagewire.trace import trace_id
from pagewire.v1 import admin_pb2, types_pb2
from pagewire.wire import MAX_WORKER_LOGPROBS, sampling_from_proto, validate_sampling
from pagewire.worker_view import (
    AdapterLabel,
    AdapterView,
    LoadSnapshot,
    PrefixSource,
    StatusSnapshot,
    TenantQueueSnapshot,
    WorkerDescription,
    WorkerFingerprint,
)

_ROLES = {"prefill": types_pb2.WORKER_ROLE_PREFILL, "decode": types_pb2.WORKER_ROLE_DECODE}
_FINISH_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "abort": types_pb2.FINISH_REASON_ABORT,
}
MAX_REQUEST_ID_LENGTH = 256
MAX_PREFIX_SOURCES = 8
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
        prefix_sources=_prefix_sources(message, worker),
        adapter=_adapter(message),
    )


def _adapter(message: types_pb2.WorkerRequest) -> AdapterLabel | None:
    if not message.HasField("adapter"):
        return None
    if not message.adapter.name:
        raise InvalidArgument("request.adapter.name", "", "must not be empty")
    return label_from_proto(message.adapter)


def label_from_proto(message: types_pb2.AdapterRef) -> AdapterLabel:
    """The plain form."""
    return AdapterLabel(message.name, message.digest, message.generation)


def label_to_proto(label: AdapterLabel) -> types_pb2.AdapterRef:
    """As it travels."""
    return types_pb2.AdapterRef(name=label.name, digest=label.digest, generation=label.generation)


def adapter_to_proto(adapter: AdapterView) -> types_pb2.Adapter:
    """As it travels."""
    return types_pb2.Adapter(
        ref=label_to_proto(adapter.label),
        rank=adapter.rank,
        path=adapter.path,
        num_bytes=adapter.num_bytes,
        resident=adapter.resident,
        retired=adapter.retired,
    )


def adapter_from_proto(message: types_pb2.Adapter) -> AdapterView:
    """The plain form."""
    label = label_from_proto(message.ref)
    return AdapterView(label, message.rank, message.path, message.num_bytes, message.resident, message.retired)


def _prefix_sources(message: types_pb2.WorkerRequest, worker: WorkerDescription) -> tuple[PrefixSource, ...]:
    """Those that hold more than this worker itself is said to; a hint that makes no sense is no error."""
    listed = message.prefix_sources[:MAX_PREFIX_SOURCES]
    own = max((each.num_blocks for each in listed if each.worker_id == worker.worker_id), default=0)
    return _listed(listed, own)


def _listed(listed: Sequence[types_pb2.PrefixSource], own: int) -> tuple[PrefixSource, ...]:
    return tuple(
        PrefixSource(
            each.endpoint,
            each.worker_id,
            each.incarnation,
            each.num_blocks,
            "prefill" if each.role == types_pb2.WORKER_ROLE_PREFILL else "decode",
            min(each.num_lower_blocks, each.num_blocks),
        )
        for each in listed
        if each.endpoint and each.num_blocks > own
    )


def prefix_sources_from_proto(message: admin_pb2.MovePrefixRequest) -> tuple[PrefixSource, ...]:
    """Who has what is to be moved."""
    listed = types_pb2.WorkerRequest(prefix_sources=message.sources)
    return _listed(listed.prefix_sources[:MAX_PREFIX_SOURCES], 0)


def holding_to_proto(worker_id: str, holding: Holding) -> admin_pb2.PrefixHolding:
    """Field by field."""
    return admin_pb2.PrefixHolding(
        worker_id=worker_id, num_blocks=holding.num_blocks, num_pinned_blocks=holding.num_pinned_blocks
    )


def prefix_source_to_proto(source: PrefixSource) -> types_pb2.PrefixSource:
    """As it travels."""
    return types_pb2.PrefixSource(
        endpoint=source.endpoint,
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        num_blocks=source.num_blocks,
        role=_ROLES[source.role],
        num_lower_blocks=source.num_lower_blocks,
    )


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


def fingerprint_to_proto(fingerprint: WorkerFingerprint) -> types_pb2.Fingerprint:
    """As it travels."""
    return types_pb2.Fingerprint(
        root=fingerprint.root,
        layout_id=fingerprint.layout_id,
        numerics_class=fingerprint.numerics_class,
        block_size=fingerprint.block_size,
        block_bytes=fingerprint.block_bytes,
    )


def fingerprint_from_proto(message: types_pb2.Fingerprint) -> WorkerFingerprint:
    """The plain form."""
    return WorkerFingerprint(
        root=message.root,
        layout_id=message.layout_id,
        numerics_class=message.numerics_class,
        block_size=message.block_size,
        block_bytes=tuple(message.block_bytes),
    )


def info_to_proto(worker: WorkerDescription) -> types_pb2.WorkerInfo:
    """As it travels."""
    return types_pb2.WorkerInfo(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        role=_ROLES[worker.role],
        endpoint=worker.endpoint,
        model=worker.model,
        fingerprint=fingerprint_to_proto(worker.fingerprint),
        max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        vocab_size=worker.vocab_size,
    )


def info_from_proto(info: types_pb2.WorkerInfo) -> WorkerDescription:
    """The plain form; ValueError if the worker does not say what it is for."""
    if info.role not in (types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE) or not info.worker_id:
        raise ValueError(f"worker {info.worker_id!r} has no role that is known here ({info.role})")
    return WorkerDescription(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role="prefill" if info.role == types_pb2.WORKER_ROLE_PREFILL else "decode",
        endpoint=info.endpoint,
        model=info.model,
        fingerprint=fingerprint_from_proto(info.fingerprint),
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        vocab_size=info.vocab_size,
    )


def load_to_proto(load: LoadSnapshot) -> types_pb2.WorkerLoad:
    """As it travels."""
    return types_pb2.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_tokens=load.num_queued_tokens,
        num_free_blocks=load.num_free_blocks,
        num_held_blocks=load.num_held_blocks,
        draining=load.draining,
        num_transfers=load.num_transfers,
    )


def load_from_proto(load: types_pb2.WorkerLoad) -> LoadSnapshot:
    """The plain form."""
    return LoadSnapshot(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_tokens=load.num_queued_tokens,
        num_free_blocks=load.num_free_blocks,
        num_held_blocks=load.num_held_blocks,
        draining=load.draining,
        num_transfers=load.num_transfers,
    )


def status_to_proto(worker: WorkerDescription, load: LoadSnapshot, status: StatusSnapshot) -> admin_pb2.WorkerStatus:
    """A worker as it sees itself."""
    return admin_pb2.WorkerStatus(
        info=info_to_proto(worker),
        load=load_to_proto(load),
        alive=True,
        num_cached_blocks=status.num_cached_blocks,
        num_referenced_blocks=status.num_referenced_blocks,
        num_requests=status.num_requests,
        tickets=[
            admin_pb2.TicketStatus(
                ticket_prefix=ticket.ticket_prefix,
                state=ticket.state,
                epoch=ticket.epoch,
                lease_ms=ticket.lease_ms,
                num_blocks=ticket.num_blocks,
                request_id=ticket.request_id,
                holder=ticket.holder,
                holder_left=ticket.holder_left,
            )
            for ticket in status.tickets
        ],
        queues=[queue_to_proto(queue) for queue in status.queues],
    )


def queue_to_proto(queue: TenantQueueSnapshot) -> admin_pb2.TenantQueue:
    """As it travels."""
    return admin_pb2.TenantQueue(tenant=queue.tenant, num_requests=queue.num_requests, num_tokens=queue.num_tokens)
