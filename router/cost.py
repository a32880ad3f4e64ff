"""What a request would cost on a worker: pure functions of plain data; tokens of prefill work are the unit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagewire.worker_view import LoadSnapshot, WorkerDescription, WorkerRole

Process = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as the policy sees it.

    `num_hit_blocks` leading blocks of this prompt lie in its cache, of which `num_lower_blocks` (by tier: "host",
    "disk") lie below the device, and `num_fetchable_blocks` on the device of some worker whose KV fits (it may be this
    one), followed by `num_fetchable_lower` (by tier) below one: what lies between the two can be fetched instead of
    computed. `serves_model` is False if it serves another model; `has_adapter` False if it lacks the request's,
    `loads_adapter` True if that is not on its device.
    `last_chosen` is a counter's value at the last choice, 0 for never.
    """

    description: WorkerDescription
    load: LoadSnapshot = field(default_factory=LoadSnapshot)
    alive: bool = True
    serves_model: bool = True
    num_hit_blocks: int = 0
    last_chosen: int = 0
    num_lower_blocks: Mapping[str, int] = field(default_factory=dict)
    num_fetchable_blocks: int = 0
    num_fetchable_lower: Mapping[str, int] = field(default_factory=dict)
    has_adapter: bool = True
    loads_adapter: bool = False

    @property
    def worker_id(self) -> str:
        return self.description.worker_id

    @property
    def process(self) -> Process:
        return self.description.worker_id, self.description.incarnation


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What a request needs, in tokens. Outputs that exist already count as prompt."""

    num_prompt_tokens: int
    num_output_tokens: int = 1
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class Weights:
    """How many tokens of prefill work one unit of something else is worth."""

    # A token that waits on a prefill worker. Below 1: waiting for a prefix that somebody computes already (a burst
    # of equal prompts) takes as long as computing it again elsewhere, but does not keep that worker from other work.
    queued_token: float = 0.75
    # A computed token, for each request that waits on the worker that computes it: as long as there is a queue, all
    # who come are later by it. Without it a long queue sends requests to where nothing is cached, whose computing
    # makes the queues longer: workers that could carry the load do not get out of that again.
    delaying_token: float = 0.1
    # A block in use on a decode worker: every step reads it.
    active_block: float = 1.0
    # A running, waiting or arriving sequence on a decode worker.
    sequence: float = 16.0
    # An uncached prompt token on a decode worker that need not compute it, only receive it; 1 if nobody else prefills.
    received_token: float = 0.25
    # An uncached prompt token that the computing worker can fetch from another one's device; from below it, which that
    # one has to load first, that costs what loading costs too.
    fetched_token: float = 0.1
    # A block that a decode worker would have to take from somebody.
    missing_block: float = 64.0
    # An adapter that has to be copied to the device, where it may displace another one.
    loaded_adapter: float = 64.0
    # A token that is cached in a lower tier, by tier, instead of one that must be computed.
    tier_token: Mapping[str, float] = field(default_factory=lambda: {"host": 0.1, "disk": 0.25})


def uncached_tokens(candidate: Candidate, num_prompt_tokens: int) -> int:
    """Prompt tokens that the worker would have to compute: at least one, since a hit is at most n - 1 tokens."""
    hit = candidate.num_hit_blocks * candidate.description.fingerprint.block_size
    return num_prompt_tokens - min(hit, num_prompt_tokens - 1)


def fetchable_tokens(candidate: Candidate, num_prompt_tokens: int) -> dict[str, int]:
    """Those of `uncached_tokens` that another worker holds, by where: "device" or a tier below it."""
    if not (candidate.num_fetchable_blocks or candidate.num_fetchable_lower):
        return {}
    block_size = candidate.description.fingerprint.block_size
    most = (num_prompt_tokens - 1) // block_size
    reached, stop, found = min(candidate.num_hit_blocks, most), 0, {}
    for place, num_blocks in (("device", candidate.num_fetchable_blocks), *candidate.num_fetchable_lower.items()):
        stop += num_blocks
        if (num_more := min(stop, most) - reached) > 0:
            found[place], reached = num_more * block_size, reached + num_more
    return found


def tokens_to_compute(candidate: Candidate, num_prompt_tokens: int) -> int:
    """Those of `uncached_tokens` that no other worker holds."""
    fetchable = fetchable_tokens(candidate, num_prompt_tokens)
    return uncached_tokens(candidate, num_prompt_tokens) - sum(fetchable.values())


def prefill_cost(candidate: Candidate, size: RequestSize, weights: Weights) -> dict[str, float]:
    """Tokens to compute before the first token is there: those of this prompt and those that wait before it."""
    fetchable = fetchable_tokens(candidate, size.num_prompt_tokens)
    uncached = uncached_tokens(candidate, size.num_prompt_tokens) - sum(fetchable.values())
    return {
        "uncached": uncached + _fetch_cost(fetchable, weights),
        "queued": weights.queued_token * candidate.load.num_queued_tokens,
        **_delay_cost(candidate, uncached, weights),
        **_tier_cost(candidate, weights),
        **_adapter_cost(candidate, weights),
    }


def _delay_cost(candidate: Candidate, num_computed: int, weights: Weights) -> dict[str, float]:
    """What the others wait longer; nothing where nobody waits."""
    num_waiting = candidate.load.num_waiting
    return {"delays": weights.delaying_token * num_waiting * num_computed} if num_waiting else {}


def _fetch_cost(fetchable: Mapping[str, int], weights: Weights) -> float:
    """Never more than what computing costs."""
    if not fetchable:
        return 0.0
    tier = {"device": 0.0, **weights.tier_token}
    return sum(num * min(1.0, weights.fetched_token + tier.get(place, 1.0)) for place, num in fetchable.items())


def _tier_cost(candidate: Candidate, weights: Weights) -> dict[str, float]:
    """What it costs to load the hits that lie below the device; nothing if none do."""
    if not candidate.num_lower_blocks:
        return {}
    block_size = candidate.description.fingerprint.block_size
    credits = weights.tier_token
    return {"tiers": sum(credits.get(tier, 1.0) * block_size * n for tier, n in candidate.num_lower_blocks.items())}


def _adapter_cost(candidate: Candidate, weights: Weights) -> dict[str, float]:
    """What keeps an adapter's requests together; nothing where it is at hand."""
    return {"adapter": weights.loaded_adapter} if candidate.loads_adapter else {}


def decode_cost(candidate: Candidate, size: RequestSize, weights: Weights) -> dict[str, float]:
    """What the sequence costs on top of what the worker has to do already."""
    load, worker = candidate.load, candidate.description
    uncached = uncached_tokens(candidate, size.num_prompt_tokens)
    fetchable = fetchable_tokens(candidate, size.num_prompt_tokens)
    # If somebody else prefills, the ticket brings everything, from wherever that one has it.
    num_fetchable, prefills = sum(fetchable.values()), weights.received_token >= 1
    fetched = _fetch_cost(fetchable, weights) if prefills else weights.received_token * num_fetchable
    num_needed = -(-(uncached + size.num_choices) // worker.fingerprint.block_size)
    return {
        "uncached": weights.received_token * (uncached - num_fetchable) + fetched,
        "queued": float(load.num_queued_tokens),
        "active": weights.active_block * (worker.num_blocks - load.num_free_blocks),
        "sequences": weights.sequence * (load.num_running + load.num_waiting + load.num_transfers),
        "missing": weights.missing_block * max(num_needed - load.num_free_blocks, 0),
        **(_delay_cost(candidate, uncached - num_fetchable, weights) if prefills else {}),
        **_tier_cost(candidate, weights),
        **_adapter_cost(candidate, weights),
    }


COSTS: dict[WorkerRole, Callable[[Candidate, RequestSize, Weights], dict[str, float]]] = {
    "prefill": prefill_cost,
    "decode": decode_cost,
}
