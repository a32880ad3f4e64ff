"""Which blocks of a prompt lie below each worker's device, and in which tier. Pure."""

from collections.abc import Mapping


def lower_blocks(on_device: Mapping[str, int], depths: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """For each worker the blocks that follow those of its device, by the fastest tier that has them.

    `on_device` and, by tier from fast to slow, `depths` are leading blocks by worker id. A worker that has nothing
    more below its device is not in the result.

        device  |####|          4 blocks
        host    |##|
        disk    |########|      -> {"disk": 4}
    """
    found: dict[str, dict[str, int]] = {}
    reached = dict(on_device)
    for tier, of_tier in depths.items():
        for worker_id, depth in of_tier.items():
            more = depth - reached.get(worker_id, 0)
            if more > 0:
                found.setdefault(worker_id, {})[tier] = more
                reached[worker_id] = depth
    return found
