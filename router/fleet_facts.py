"""What every request asks of the fleet and only its changes alter: limits, and what prompts are hashed for."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.worker_view import WorkerFingerprint
from router.fleet import FleetWorker
from router.placement import Limits
from router.prompt_keys import KeySpace


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """Of these `workers` (by worker id) and one model. `limits` is None without a decode worker that can take work.

    `groups`: workers with equal numbers have equal fingerprints; `living` has those of them that are alive.
    """

    workers: Mapping[str, FleetWorker]
    limits: Limits | None
    key_spaces: list[KeySpace]
    groups: Mapping[str, int]
    living: Mapping[str, int]

    @classmethod
    def of(cls, workers: Mapping[str, FleetWorker], model: str) -> "FleetFacts":
        """Looks at each worker once."""
        ours = [each for each in workers.values() if each.description.model == model]
        alive = {each.description.fingerprint for each in ours if each.alive}
        numbers: dict[WorkerFingerprint, int] = {}
        groups = {
            worker_id: numbers.setdefault(each.description.fingerprint, len(numbers))
            for worker_id, each in workers.items()
        }
        return cls(
            workers,
            _limits([each for each in ours if each.is_available and each.description.role == "decode"]),
            sorted({(each.root, each.block_size) for each in alive}),
            groups,
            {worker_id: groups[worker_id] for worker_id, each in workers.items() if each.alive},
        )


def _limits(decoders: list[FleetWorker]) -> Limits | None:
    able = [each.description for each in decoders]
    if not able:
        return None
    largest = max(able, key=lambda each: (each.max_model_len, each.num_blocks * each.fingerprint.block_size))
    pool = max(each.num_blocks * each.fingerprint.block_size for each in able)
    return Limits(largest.max_model_len, pool, largest.fingerprint.block_size)
