"""Between protobuf and plain data for what workers say of themselves: who they are, load, adapters, what they hold."""

from collections.abc import Sequence

from pagewire.prefix_control import Holding
from pagewire.v1 import admin_pb2, types_pb2
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
MAX_PREFIX_SOURCES = 8


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


def request_sources_from_proto(message: types_pb2.WorkerRequest, worker: WorkerDescription) -> tuple[PrefixSource, ...]:
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


def move_sources_from_proto(message: admin_pb2.MovePrefixRequest) -> tuple[PrefixSource, ...]:
    """Who has what is to be moved."""
    listed = types_pb2.WorkerRequest(prefix_sources=message.sources)
    return _listed(listed.prefix_sources[:MAX_PREFIX_SOURCES], 0)


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


def holding_to_proto(worker_id: str, holding: Holding) -> admin_pb2.PrefixHolding:
    """Field by field."""
    return admin_pb2.PrefixHolding(
        worker_id=worker_id, num_blocks=holding.num_blocks, num_pinned_blocks=holding.num_pinned_blocks
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
