"""Which worker gets a request: pure scoring over plain data; time and randomness come in as arguments.

prefix       the cheapest by cached prefix and load (`router/cost.py`); the default
load         the same without the cached prefix
session      the worker that the session's id picks (rendezvous hashing: all routers agree, and a worker that comes
             or goes moves only its own sessions); `prefix` if that one is unfit or the request has no session
round_robin  whoever was chosen longest ago
random       anybody
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from pagewire.worker_view import WorkerDescription
from router.cost import COSTS, Candidate, Process, RequestSize, Weights, uncached_tokens

Policy = Literal["prefix", "load", "round_robin", "random", "session"]
_WEIGHTS = Weights()
_NOBODY_ELSE_PREFILLS = replace(_WEIGHTS, received_token=1.0)
Reason = Literal["disaggregated", "short", "no_prefill_worker", "outputs_exist"]


@dataclass(frozen=True, slots=True)
class Score:
    """A worker's cost, lowest wins, and what it is made of."""

    worker_id: str
    cost: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen worker and the scores of all who can take it, best first; `sticky`: the session decided."""

    candidate: Candidate
    scores: tuple[Score, ...]
    sticky: bool = False

    @property
    def num_hit_blocks(self) -> int:
        return self.candidate.num_hit_blocks


@dataclass(frozen=True, slots=True)
class Plan:
    """Who prefills (None: the decode worker does) and who decodes, and why it is so."""

    prefill: Choice | None
    decode: Choice
    reason: Reason


@dataclass(frozen=True, slots=True)
class NoDecodeWorker:
    """Nobody can decode this now. `avoided` says that somebody could if nobody were avoided."""

    message: str
    avoided: bool


def obstacle(candidate: Candidate, size: RequestSize, avoid: Set[Process] = frozenset()) -> str:
    """Why the worker cannot take the request; empty if it can."""
    worker = candidate.description
    if not candidate.serves_model:
        return "other model"
    if not candidate.alive:
        return "unreachable"
    if not candidate.has_adapter:
        return "lacks the adapter"
    if candidate.load.draining:
        return "draining"
    if not _fits(worker, size):
        return "too small"
    return "avoided" if candidate.process in avoid else ""


def _fits(worker: WorkerDescription, size: RequestSize) -> bool:
    """A prefill worker holds the prompt. A decode worker's context holds the longest output too (one that ends early
    would give less than was promised); its pool holds the prompt, the rest is for preemption."""
    if worker.role == "decode" and size.num_prompt_tokens + size.num_output_tokens > worker.max_model_len:
        return False
    num_blocks = -(-size.num_prompt_tokens // worker.fingerprint.block_size)
    return size.num_prompt_tokens <= worker.max_model_len and num_blocks <= worker.num_blocks


def score(candidate: Candidate, size: RequestSize, policy: Policy, rng: Random, weights: Weights) -> Score:
    """One worker's score under a policy; `session` is scored as `prefix`. `load` is `prefix` without the hits."""
    if policy == "random":
        parts = {"random": rng.random()}
    elif policy == "round_robin":
        parts = {"last_chosen": float(candidate.last_chosen)}
    else:
        parts = COSTS[candidate.description.role](candidate, size, weights)
        if policy == "load":
            for of_the_cache in ("uncached", "delays", "tiers"):
                parts.pop(of_the_cache, None)
    return Score(candidate.worker_id, sum(parts.values()), parts)


def choose(
    candidates: Iterable[Candidate],
    size: RequestSize,
    *,
    policy: Policy = "prefix",
    rng: Random,
    avoid: Set[Process] = frozenset(),
    weights: Weights = _WEIGHTS,
    temperature: float = 0.0,
    session_id: str = "",
) -> Choice | None:
    """The cheapest worker that can take the request; of equals the one chosen longest ago, then one at random.

    So prompts that nobody knows spread over the workers. With `temperature` > 0 (policies by cost only) a worker is
    drawn with probability ~ exp(-(cost - least) / (temperature x (greatest - least))).
    """
    candidates = list(candidates)
    able = [candidate for candidate in candidates if not obstacle(candidate, size, avoid)]
    if not able:
        return None
    scored = [(score(each, size, policy, rng, weights), each) for each in able]
    scored.sort(key=lambda pair: (pair[0].cost, pair[1].last_chosen, rng.random()))
    scores = tuple(each for each, _ in scored)
    if policy == "session" and session_id:
        sticky = sticky_worker([each for each in candidates if each.serves_model], session_id)
        if sticky in able:
            return Choice(sticky, scores, sticky=True)
    drawn = 0 if temperature <= 0 or policy in ("random", "round_robin") else _draw(scores, temperature, rng)
    return Choice(scored[drawn][1], scores)


def sticky_worker(candidates: Iterable[Candidate], session_id: str) -> Candidate:
    """The worker whose hash with the session's id is the greatest, fit or not: routers see death at different times,
    and a session is to come back to its worker. At least one candidate is needed."""

    def weight(candidate: Candidate) -> bytes:
        return hashlib.sha256(f"{session_id}\0{candidate.worker_id}".encode()).digest()

    return max(candidates, key=weight)


def _draw(scores: Sequence[Score], temperature: float, rng: Random) -> int:
    """An index by the softmax of the costs, best first, in units of their spread."""
    least, greatest = scores[0].cost, scores[-1].cost
    if greatest <= least:
        return 0
    unit = temperature * (greatest - least)
    return rng.choices(range(len(scores)), [math.exp(-(each.cost - least) / unit) for each in scores])[0]


def plan(
    candidates: Sequence[Candidate],
    size: RequestSize,
    *,
    policy: Policy = "prefix",
    rng: Random,
    avoid: Set[Process] = frozenset(),
    wants_prefill: bool = True,
    local_prefill_max_tokens: int = 0,
    numerics_class: str | None = None,
    weights: Weights = _WEIGHTS,
    temperature: float = 0.0,
    session_id: str = "",
) -> Plan | NoDecodeWorker:
    """Decode worker first, then a prefill worker whose KV it can read.

    There is none when the decode worker lacks at most `local_prefill_max_tokens` tokens and not more than one of its
    steps takes are waiting there for prefill (conditional disaggregation: a short rest is done before a transfer would
    have been, but must not hold up those who decode), when nobody is fit to prefill (decode-only fallback), or when
    the prefill is done (`wants_prefill` False). Of the decode workers those of `numerics_class` are preferred: a
    migrated request then goes on bit for bit.
    """
    how: dict[str, Any] = {
        "policy": policy,
        "rng": rng,
        "avoid": avoid,
        "temperature": temperature,
        "session_id": session_id,
    }
    decoders = [each for each in candidates if each.description.role == "decode"]
    if not (wants_prefill and any(_can_prefill(each, size, avoid) for each in candidates)):
        weights = _NOBODY_ELSE_PREFILLS if weights is _WEIGHTS else replace(weights, received_token=1.0)
    decode: Choice | None = None
    if numerics_class is not None:
        same_class = [each for each in decoders if each.description.fingerprint.numerics_class == numerics_class]
        decode = choose(same_class, size, weights=weights, **how)
    decode = decode or choose(decoders, size, weights=weights, **how)
    if decode is None:
        return _no_decode_worker(decoders, size, avoid)
    if not wants_prefill:
        return Plan(None, decode, "outputs_exist")
    if _is_short(decode.candidate, size, local_prefill_max_tokens):
        return Plan(None, decode, "short")
    readable = [each for each in candidates if each.description.role == "prefill" and can_read(decode.candidate, each)]
    prefill = choose(readable, size, weights=weights, **how)
    return Plan(prefill, decode, "disaggregated" if prefill is not None else "no_prefill_worker")


def _is_short(decode: Candidate, size: RequestSize, max_tokens: int) -> bool:
    return (
        uncached_tokens(decode, size.num_prompt_tokens) <= max_tokens
        and decode.load.num_queued_tokens <= decode.description.max_num_batched_tokens
    )


def _can_prefill(candidate: Candidate, size: RequestSize, avoid: Set[Process]) -> bool:
    return candidate.description.role == "prefill" and not obstacle(candidate, size, avoid)


def can_read(decode: Candidate, prefill: Candidate) -> bool:
    """True if KV may travel between the two; the handshake checks the same."""
    return decode.description.fingerprint.fits(prefill.description.fingerprint)


def _no_decode_worker(decoders: Sequence[Candidate], size: RequestSize, avoid: Set[Process]) -> NoDecodeWorker:
    reasons = [obstacle(each, size, avoid) for each in decoders]
    if not reasons:
        return NoDecodeWorker("no decode worker is known", avoided=False)
    listed = ", ".join(sorted(f"{each.worker_id} {reason}" for each, reason in zip(decoders, reasons, strict=True)))
    return NoDecodeWorker(f"no decode worker can take the request: {listed}", avoided="avoided" in reasons)
