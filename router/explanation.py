"""Why a request goes where it goes: the policy's view of every worker, as plain data for people."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from pagewire.worker_view import WorkerRole
from router.cost import Candidate, Process, RequestSize
from router.policy import Choice, NoDecodeWorker, Plan, can_read, obstacle


@dataclass(frozen=True, slots=True)
class Verdict:
    """One worker: its cost and the parts of it if it could take the request, else the obstacle.

    `num_hit_blocks` counts what the router assumes of its last decisions, `num_indexed_blocks` what the index says.
    """

    worker_id: str
    role: WorkerRole
    num_hit_blocks: int
    num_indexed_blocks: int
    obstacle: str = ""
    cost: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision. `decode_worker` is empty if there is none, and `reason` then says why; `prefill_worker` if decode
    prefills. The verdicts are in the order of cost within a role, those with an obstacle last."""

    num_prompt_tokens: int
    policy: str
    prefill_worker: str
    decode_worker: str
    reason: str
    verdicts: tuple[Verdict, ...]


def explain(
    candidates: Sequence[Candidate],
    size: RequestSize,
    planned: Plan | NoDecodeWorker,
    *,
    policy: str,
    indexed: Mapping[str, int],
    open_breakers: Set[Process] = frozenset(),
) -> Explanation:
    """What `policy.plan` made of the candidates when it avoided `open_breakers`."""
    prefill = planned.prefill if isinstance(planned, Plan) else None
    decode = planned.decode if isinstance(planned, Plan) else None
    scores = {score.worker_id: score for choice in (prefill, decode) if choice for score in choice.scores}

    def verdict(each: Candidate) -> Verdict:
        score = scores.get(each.worker_id)
        why_not = "" if score else obstacle(each, size) or _not_asked(each, decode, open_breakers)
        return Verdict(
            each.worker_id,
            each.description.role,
            each.num_hit_blocks,
            indexed.get(each.worker_id, 0),
            why_not,
            score.cost if score else 0.0,
            score.parts if score else {},
        )

    verdicts = sorted(map(verdict, candidates), key=lambda v: (v.role != "prefill", bool(v.obstacle), v.cost))
    return Explanation(
        size.num_prompt_tokens,
        policy,
        _name(prefill),
        _name(decode),
        planned.reason if isinstance(planned, Plan) else planned.message,
        tuple(verdicts),
    )


def _not_asked(candidate: Candidate, decode: Choice | None, open_breakers: Set[Process]) -> str:
    """Why a worker that could take the request was not scored."""
    if candidate.process in open_breakers:
        return "breaker open"
    if decode is None:
        return "no decode worker"
    if candidate.description.role == "decode":
        return "other numerics class"
    return "not needed" if can_read(decode.candidate, candidate) else "other fingerprint"


def _name(choice: Choice | None) -> str:
    return "" if choice is None else choice.candidate.worker_id
