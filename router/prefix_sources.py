"""The hint that goes with a request: which workers hold its leading blocks, so that whoever prefills can fetch them."""

from collections.abc import Iterable, Mapping, Set

from pagewire.worker_view import PrefixSource, WorkerDescription, WorkerFingerprint

MAX_SOURCES = 4
NOTHING: Mapping[str, Mapping[str, int]] = {}


def prefix_sources(
    workers: Iterable[WorkerDescription],
    depths: Mapping[str, int],
    fingerprint: WorkerFingerprint,
    without: Set[tuple[str, int]] = frozenset(),
    *,
    lower: Mapping[str, Mapping[str, int]] = NOTHING,
) -> tuple[PrefixSource, ...]:
    """The live `workers` whose KV fits `fingerprint` and that hold blocks, longest first; of equals those that have
    most on the device, then prefill workers.

    `depths` are leading blocks on the device, `lower` those that follow them by tier, as the index has them and not as
    assumed: a block that is still to be computed cannot be fetched. The worker that gets the hint may be among them and
    skips itself. `without` names processes that have just failed.
    """
    holders = []
    for each in workers:
        num_lower = sum(lower.get(each.worker_id, {}).values())
        num_blocks = depths.get(each.worker_id, 0) + num_lower
        if num_blocks and each.fingerprint == fingerprint and (each.worker_id, each.incarnation) not in without:
            holders.append(
                PrefixSource(each.endpoint, each.worker_id, each.incarnation, num_blocks, each.role, num_lower)
            )
    holders.sort(
        key=lambda source: (
            -source.num_blocks,
            source.num_lower_blocks,
            source.role != "prefill",
            source.worker_id,
        )
    )
    return tuple(holders[:MAX_SOURCES])
