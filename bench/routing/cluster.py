"""The simulated cluster: the router's own placer over simulated workers, and open load."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.routing.outcome import Outcome, Sample
from bench.routing.workers import Clock, Decode, Machine, Prefill, Request, World
from bench.routing.workload import BLOCK, Users, Workload
from kvstore.memory_index import MemoryIndex
from kvstore.redis_keys import index_keys
from router.fleet import FleetWorker
from router.fleet_placer import FleetPlacer
from router.placement import Demand


class Keys:
    """Stands for PromptKeys: simulated prompts have keys and no tokens."""

    def __init__(self, keys: Sequence[bytes], num_tokens: int) -> None:
        self._keys = index_keys(keys)
        self.num_tokens = num_tokens

    def of(self, space: object, output: Sequence[int] = ()) -> list[bytes]:
        return self._keys


class Fleet:
    """What FleetPlacer asks of a fleet; loads are those of the last message."""

    def __init__(self) -> None:
        self._workers: dict[str, FleetWorker] = {}

    def see(self, workers: Sequence[Prefill | Decode]) -> None:
        nowhere: Any = None
        self._workers = {
            each.description.worker_id: FleetWorker(each.description, each.load(), True, nowhere) for each in workers
        }

    def workers(self) -> Mapping[str, FleetWorker]:
        return self._workers


@dataclass(slots=True)
class Cluster:
    """Workers, router and users; `run` returns what happened to the requests that arrived after the warm-up."""

    machine: Machine
    workload: Workload
    policy: str
    rate: float  # requests/s
    seed: int = 0
    chance: int = 0  # seed of what is not the users': the policy's and the slowness's draws
    slowness: Sequence[float] = (1.0,)  # drawn for each step
    every: int = 1  # of the requests that arrived in the measured time only every so-manieth counts
    clock: Clock = field(default_factory=Clock)
    index: MemoryIndex = field(default_factory=MemoryIndex)
    done: list[Request] = field(default_factory=list)
    arrived: list[Request] = field(default_factory=list)

    def run(self, warm_up: float, seconds: float) -> Outcome:
        machine, workload, rng = self.machine, self.workload, Random(self.seed)
        draws = Random(self.chance)
        world = World(
            machine,
            0.0 if self.policy == "oracle" else machine.lag_seconds,
            self.clock,
            self.index,
            self._finished,
            lambda: draws.choice(self.slowness),
        )
        num_blocks = workload.blocks_per_worker(machine.num_prefill)
        prefills = [Prefill(f"prefill-{n}", num_blocks, world) for n in range(machine.num_prefill)]
        num_blocks *= machine.decode_pool
        decodes = [Decode(f"decode-{n}", num_blocks, world) for n in range(machine.num_decode)]
        by_name: dict[str, Any] = {each.description.worker_id: each for each in (*prefills, *decodes)}
        fleet: Any = Fleet()
        policy: Any = "prefix" if self.policy == "oracle" else self.policy
        placer = FleetPlacer(
            fleet,
            self.index,
            model="sim",
            policy=policy,
            may_fetch=machine.fetch_rate > 0,
            rng=Random(self.chance),
            clock=lambda: self.clock.now,
        )
        users = Users(workload, _chain)

        def tell_load() -> None:
            fleet.see([*prefills, *decodes])
            self.clock.after(0.1, tell_load)

        def arrive() -> None:
            self.clock.after(rng.expovariate(self.rate), arrive)
            request = self._ask(users, rng)
            keys: Any = Keys(request.keys[: request.num_prompt_blocks], request.num_prompt_tokens)
            demand = Demand((0,) * request.num_prompt_tokens, "", request.num_output_tokens, 1, keys=keys)
            placement = placer.place(demand)
            assert placement.prefill is not None
            request.decode = by_name[placement.decode.worker_id]
            request.num_expected_tokens = placement.num_expected_tokens
            sources = [by_name[each.worker_id] for each in placement.prefix_sources]
            by_name[placement.prefill.worker_id].add(request, sources)

        tell_load()
        arrive()
        self.clock.run(warm_up)
        self.arrived.clear()
        self.done.clear()
        self.clock.run(warm_up + seconds)
        for each in by_name.values():
            each.pool.check_integrity()
        self.index.check_integrity()
        samples = [
            Sample(each.first_token - each.arrived, each.num_prompt_tokens, each.num_hit_blocks * BLOCK)
            if each.first_token
            else Sample(self.clock.now - each.arrived)
            for each in self.arrived[:: self.every]
        ]
        num_output_tokens = sum(each.num_output_tokens for each in self.done)
        return Outcome.of(
            "simulated", self.policy, workload.working_set, self.rate, samples, num_output_tokens / seconds
        )

    def _ask(self, users: Users[bytes], rng: Random) -> Request:
        chat = users.ask(rng)
        num_prompt_blocks = len(chat.said)
        chat.said += _chain(self.workload.answer_tokens)
        request = Request(self.clock.now, list(chat.said), num_prompt_blocks, self.workload.answer_tokens, chat)
        self.arrived.append(request)
        return request

    def _finished(self, request: Request) -> None:
        request.chat.busy = False
        self.done.append(request)


def _chain(num_tokens: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(num_tokens // BLOCK)]


def sustained_rate(
    machine: Machine, workload: Workload, warm_up: float, seconds: float, *, seeds: int, step: float
) -> float:
    """The highest rate at which `prefix` keeps nine of ten first tokens within a second and decoding keeps up, for each
    of `seeds` crowds of users; to a factor of `step`. Near its limit it depends on chance whether a cold start is
    over before queues are long, so the search runs as long as what is then measured.
    """

    def sustains(rate: float, seed: int) -> bool:
        outcome = Cluster(machine, workload, "prefix", rate, seed).run(warm_up, seconds)
        wanted = rate * workload.answer_tokens
        return outcome.ttft_p90 <= 1.0 and outcome.output_tokens_per_second >= 0.95 * wanted

    # Without any cached answer, and with everything else cached.
    least, most = workload.system_tokens, workload.question_tokens + workload.answer_tokens / 2
    low, high = (machine.num_prefill * machine.prefill_rate / tokens for tokens in (2 * least, most))
    while high / low > step:
        rate = (low * high) ** 0.5
        low, high = (rate, high) if all(sustains(rate, seed) for seed in range(seeds)) else (low, rate)
    return low
