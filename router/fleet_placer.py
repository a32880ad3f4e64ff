"""Places requests on the fleet: hit depths from the index and the router's own assumptions, load, then the policy."""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from random import Random

import grpc

from kvstore.index import PrefixIndex
from kvstore.routed_stream import Routed
from pagewire.worker_view import AdapterLabel, PrefixSource
from router.adapters import AdapterDirectory
from router.assumptions import Assumptions
from router.cost import Candidate, Process, RequestSize, tokens_to_compute
from router.decision import Case, placement
from router.explanation import Explanation, explain
from router.fleet import Fleet, FleetWorker
from router.fleet_facts import FleetFacts
from router.live_index import LiveIndex
from router.placement import Demand, Limits, NoWorker, Placement, Worker
from router.policy import Choice, NoDecodeWorker, Plan, Policy, plan
from router.prefix_sources import prefix_sources
from router.prompt_keys import KeySpace, PromptKeys
from router.tier_depths import NOTHING, best_holdings

logger = logging.getLogger(__name__)


# Policies that look at the workers' caches.
_BY_PREFIX = ("prefix", "session")


class FleetPlacer:
    """The pipeline's Placer. Nothing here waits: the index and the loads are in memory.

    A worker's blocks count only if the index has them from the incarnation that is alive now. `may_fetch` False:
    workers do not fetch from each other, so what others hold must be computed.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex | None,
        *,
        model: str,
        policy: Policy = "prefix",
        local_prefill_max_tokens: int = 0,
        temperature: float = 0.0,
        may_fetch: bool = True,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._has_index = index is not None
        self._index = LiveIndex(index)
        self._model = model
        self._policy = policy
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._temperature = temperature
        self._may_fetch = may_fetch
        self._rng = rng or Random()
        self._clock = clock
        self._assumptions = Assumptions()
        self._adapters = AdapterDirectory()
        self._last_chosen: dict[Process, int] = {}
        self._count = itertools.count(1)
        self._known: FleetFacts | None = None
        self.last_plan: Plan | None = None
        self.on_routed: Callable[[Routed], None] | None = None  # tells other routers

    def limits(self) -> Limits | None:
        return self._facts().limits

    def _facts(self) -> FleetFacts:
        """Made anew when the fleet has changed: asked several times for each request."""
        workers = self._fleet.workers()
        if self._known is None or self._known.workers is not workers:
            self._known = FleetFacts.of(workers, self._model)
        return self._known

    def adapters(self) -> Mapping[str, AdapterLabel]:
        """What some decode worker has now, or the last ones had; a load that only others have is of no use."""
        return self._adapters.newest(
            [
                worker.load.adapters
                for worker in self._fleet.workers().values()
                if worker.is_available
                and worker.description.role == "decode"
                and worker.description.model == self._model
            ]
        )

    def place(self, demand: Demand, avoid: Set[Process] = frozenset()) -> Placement:
        now = self._clock()
        case = self._case(demand, now)
        planned = self._plan(case, demand, avoid, self._rng)
        if isinstance(planned, NoDecodeWorker):
            raise NoWorker(planned.message, avoided=planned.avoided)
        self.last_plan = planned
        decode_computes = planned.prefill is None
        if planned.prefill is not None:
            self._note(planned.prefill, case, now, computes=True)
        self._note(planned.decode, case, now, computes=decode_computes)
        placed = placement(planned, case, self._prefix_sources(planned, case, avoid))
        _log(demand, planned, placed, self._policy)
        return placed

    def explain(self, demand: Demand, open_breakers: Set[Process] = frozenset()) -> Explanation:
        """What `place` would do now if it were to avoid `open_breakers`, and why.

        Nothing is noted, and chance falls as it would have.
        """
        rng = Random()
        rng.setstate(self._rng.getstate())
        case = self._case(demand, self._clock())
        planned = self._plan(case, demand, open_breakers, rng)
        return explain(
            case.candidates,
            case.size,
            planned,
            policy=self._policy,
            indexed=case.indexed,
            open_breakers=open_breakers,
        )

    def _prefix_sources(self, planned: Plan, case: Case, avoid: Set[Process]) -> tuple[PrefixSource, ...]:
        """Whatever the policy: the less it cares for caches, the more there is to fetch."""
        if not self._has_index:
            return ()
        workers = self._fleet.workers().values()
        alive = [each.description for each in workers if each.alive and not each.load.draining]
        fingerprint = planned.decode.candidate.description.fingerprint
        return prefix_sources(alive, case.on_device, fingerprint, avoid, lower=case.lower)

    def key_spaces(self) -> list[KeySpace]:
        """What is to be hashed before `place`: for the policy, or for the hint who holds the prefix."""
        if self._policy not in _BY_PREFIX and not self._has_index:
            return []
        return self._facts().key_spaces

    def is_alive(self, worker: Worker) -> bool:
        found = self._fleet.find(*worker.process)
        return found is not None and found.alive

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        return self._fleet.channel(worker.worker_id, worker.endpoint)

    def _plan(self, case: Case, demand: Demand, avoid: Set[Process], rng: Random) -> Plan | NoDecodeWorker:
        return plan(
            case.candidates,
            case.size,
            policy=self._policy,
            rng=rng,
            avoid=avoid,
            wants_prefill=demand.prefill,
            local_prefill_max_tokens=self._local_prefill_max_tokens,
            numerics_class=demand.numerics_class or None,
            temperature=self._temperature,
            session_id=demand.session_id,
        )

    def _case(self, demand: Demand, now: float) -> Case:
        """All that the policy is to know."""
        facts = self._facts()
        workers = facts.workers
        prompt_keys, output = _prompt_keys(demand)
        keys: dict[bytes, list[bytes]] = {}
        on_device: dict[str, int] = {}
        lower: dict[str, Mapping[str, int]] = {}
        assumed: dict[str, int] = {}
        by_prefix = self._policy in _BY_PREFIX
        for space in self.key_spaces():
            root = space[0]
            keys[root] = prompt_keys.of(space, output)
            incarnations = {
                each: worker.description.incarnation
                for each, worker in workers.items()
                if worker.description.fingerprint.root == root
            }
            depths = self._index.depths(keys[root], incarnations)
            on_device |= depths.on_device
            lower |= depths.lower
            if by_prefix:
                assumed |= self._assumptions.hits(keys[root], list(incarnations), now)
        indexed = {
            worker_id: on_device.get(worker_id, 0) + sum(lower.get(worker_id, {}).values())
            for worker_id in on_device.keys() | lower.keys()
        }
        is_held = self._may_fetch and by_prefix and any(indexed.values())
        fetchable = best_holdings(on_device, lower, facts.living) if is_held else {}
        known = indexed if by_prefix else {}  # other policies do not look; what comes of it is counted all the same
        loads = self._assumptions.loads(now)
        candidates = [
            Candidate(
                worker.description,
                worker.load
                if (sent := loads.get(worker_id)) is None
                else worker.load.plus(sent.num_tokens, sent.num_sequences),
                alive=worker.alive,
                serves_model=worker.description.model == self._model,
                num_hit_blocks=max(known.get(worker_id, 0), assumed.get(worker_id, 0)),
                last_chosen=self._last_chosen.get((worker_id, worker.description.incarnation), 0),
                num_lower_blocks=lower.get(worker_id, {})
                if known.get(worker_id, 0) > assumed.get(worker_id, 0)
                else {},
                num_fetchable_blocks=fetchable.get(facts.groups[worker_id], NOTHING).on_device,
                num_fetchable_lower=fetchable.get(facts.groups[worker_id], NOTHING).lower,
                **self._adapter_at(worker, demand.adapter),
            )
            for worker_id, worker in workers.items()
        ]
        size = RequestSize(len(demand.prompt_token_ids), demand.num_output_tokens, demand.num_choices)
        return Case(size, keys, on_device, lower, indexed, candidates)

    def _adapter_at(self, worker: FleetWorker, label: AdapterLabel | None) -> dict[str, bool]:
        """A load that was replaced meanwhile is still good for a request that began with it."""
        if label is None:
            return {}
        found = self._adapters.find(worker.description.worker_id, worker.load.adapters, label)
        return {"has_adapter": found is not None, "loads_adapter": found is None or not found.resident}

    def _note(self, choice: Choice, case: Case, now: float, *, computes: bool) -> None:
        candidate = choice.candidate
        self._last_chosen[candidate.process] = next(self._count)
        routed = Routed(
            candidate.worker_id,
            candidate.description.incarnation,
            tuple(case.keys.get(candidate.description.fingerprint.root, ())) if self._policy in _BY_PREFIX else (),
            num_tokens=tokens_to_compute(candidate, case.size.num_prompt_tokens) if computes else 0,
            num_sequences=case.size.num_choices if candidate.description.role == "decode" else 1,
        )
        self._assume(routed, now)
        if self.on_routed is not None:
            self.on_routed(routed)

    def note_routed_elsewhere(self, routed: Routed) -> None:
        """Another router of the same model has decided this; it counts as if it were this one's own."""
        worker = self._fleet.find(routed.worker_id, routed.incarnation)
        if worker is not None:
            self._last_chosen[routed.worker_id, routed.incarnation] = next(self._count)
            self._assume(routed, self._clock())

    def _assume(self, routed: Routed, now: float) -> None:
        self._assumptions.note_routed(
            routed.worker_id, routed.keys, now, num_tokens=routed.num_tokens, num_sequences=routed.num_sequences
        )

    def worker_restarted(self, worker_id: str, old: int, new: int) -> None:
        """For the fleet's `on_new_incarnation`: what was assumed of the old process is void."""
        self._assumptions.forget_worker(worker_id)
        self._last_chosen.pop((worker_id, old), None)

    def keep_only(self, processes: Collection[Process]) -> None:
        """Everybody else is gone."""
        self._assumptions.keep_only({worker_id for worker_id, _ in processes})
        for process in self._last_chosen.keys() - set(processes):
            del self._last_chosen[process]
        self._adapters.keep_only({worker_id for worker_id, _ in processes})


def _prompt_keys(demand: Demand) -> tuple[PromptKeys, tuple[int, ...]]:
    """The prompt's keys, and the output that follows it."""
    keys = demand.keys or PromptKeys(demand.prompt_token_ids, demand.cache_salt, demand.adapter)
    return keys, demand.prompt_token_ids[keys.num_tokens :]


def _log(demand: Demand, planned: Plan, placed: Placement, policy: Policy) -> None:
    """One line a decision: who, why, and at what cost compared with the next best."""
    if not logger.isEnabledFor(logging.INFO):
        return
    extra: dict[str, object] = {
        "request_id": demand.request_id,
        "policy": policy,
        "reason": planned.reason,
        "prompt_tokens": len(demand.prompt_token_ids),
        "hit_tokens": placed.num_hit_tokens,
        "assumed_tokens": placed.num_assumed_tokens,
        "best_tokens": placed.num_best_tokens,
    }
    for role, choice in (("prefill", planned.prefill), ("decode", planned.decode)):
        if choice is not None:
            extra[role] = choice.candidate.worker_id
            extra[f"{role}_costs"] = " ".join(f"{each.worker_id}={each.cost:.0f}" for each in choice.scores[:3])
            if choice.sticky:
                extra[f"{role}_sticky"] = True
    logger.info("placed", extra=extra)
