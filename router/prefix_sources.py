"""The hint that goes with a request: which workers hold its leading blocks, so that whoever prefills can fetch them."""

from collections.abc import Iterable, Mapping, Set

from pagewire.worker_view import PrefixSource, WorkerDescription, WorkerFingerprint

MAX_SOURCES = 4


def prefix_sources(
    workers: Iterable[WorkerDescription],
    depths: Mapping[str, int],
    fingerprint: WorkerFingerprint,
    without: Set[tuple[str, int]] = frozenset(),
) -> tuple[PrefixSource, ...]:
    """The live `workers` whose KV fits `fingerprint` and that hold blocks, longest first; of equals prefill workers.

    `depths` are what the index has, not what is assumed: a block that is still to be computed cannot be fetched. The
    worker that gets the hint may be among them and skips itself. `without` names processes that have just failed.
    """
    holders = [
        PrefixSource(each.endpoint, each.worker_id, each.incarnation, depths[each.worker_id], each.role)
        for each in workers
        if depths.get(each.worker_id, 0) > 0
        and each.fingerprint == fingerprint
        and (each.worker_id, each.incarnation) not in without
    ]
    holders.sort(key=lambda source: (-source.num_blocks, source.role != "prefill", source.worker_id))
    return tuple(holders[:MAX_SOURCES])
