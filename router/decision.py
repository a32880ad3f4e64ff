"""What one decision is made from, and what the request is told of it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.worker_view import PrefixSource
from router.cost import Candidate, RequestSize, tokens_to_compute
from router.placement import Placement, Worker
from router.policy import Choice, Plan


@dataclass(frozen=True, slots=True)
class Case:
    """Index keys by root, blocks in the index by worker id.

    `lower` are those below the device by tier, `indexed` counts both; others can fetch all of them. Candidates know of
    it if the policy is to.
    """

    size: RequestSize
    keys: Mapping[bytes, Sequence[bytes]]
    on_device: Mapping[str, int]
    lower: Mapping[str, Mapping[str, int]]
    indexed: Mapping[str, int]
    candidates: Sequence[Candidate]


def placement(planned: Plan, case: Case, sources: tuple[PrefixSource, ...]) -> Placement:
    """The plan in the pipeline's words, with what it counted on."""
    prefills = planned.prefill or planned.decode
    num_tokens = case.size.num_prompt_tokens

    def hit_tokens(num_blocks: int, candidate: Candidate) -> int:
        """The last token is computed in any case."""
        return min(num_blocks * candidate.description.fingerprint.block_size, num_tokens - 1)

    return Placement(
        None if planned.prefill is None else _worker(planned.prefill),
        _worker(planned.decode),
        num_hit_tokens=hit_tokens(case.indexed.get(prefills.candidate.worker_id, 0), prefills.candidate),
        num_device_tokens=hit_tokens(case.on_device.get(prefills.candidate.worker_id, 0), prefills.candidate),
        num_assumed_tokens=hit_tokens(prefills.num_hit_blocks, prefills.candidate),
        num_best_tokens=max(
            hit_tokens(case.indexed.get(each.worker_id, 0), each) for each in case.candidates if each.alive
        ),
        num_expected_tokens=num_tokens - tokens_to_compute(prefills.candidate, num_tokens),
        prefix_sources=sources,
    )


def _worker(choice: Choice) -> Worker:
    description = choice.candidate.description
    return Worker(
        description.worker_id,
        description.incarnation,
        description.endpoint,
        description.fingerprint.numerics_class,
    )
