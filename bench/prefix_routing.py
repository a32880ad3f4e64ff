"""Simulates a cluster whose requests share prefixes, with the router's own placer, index and the workers' block pool.

    .venv/bin/python bench/prefix_routing.py --quick                    a minute or two, prints a table
    .venv/bin/python bench/prefix_routing.py --out FILE --plot PNG      the full size, a CSV and a plot

Workload: customers with a system prompt of 6000 tokens each, five users each, multi-turn chats. Its working set (what
would have to be cached for every request to hit) is 37 % or 73 % of the prefill workers' KV. First the highest rate
that `prefix` sustains is searched; then every policy gets 90 % of it for the same time. `oracle` is `prefix` with an
index that shows all caches without delay. No KV is fetched between prefill workers.

Real: FleetPlacer (policy, assumptions), MemoryIndex, BlockPool (LRU, references). Simulated: time, from measured rates
(`--prefill-rate`, `--step-ms`, `--step-per-seq-ms`); load messages each 100 ms, index events after `--lag-ms`.
"""

import argparse
import csv
import heapq
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import describe
from kvstore.block_pool import BlockPool
from kvstore.memory_index import MemoryIndex
from kvstore.redis_keys import index_keys
from kvstore.registry import WorkerRecord
from pagewire.worker_view import LoadSnapshot, WorkerDescription, WorkerFingerprint, WorkerRole
from router.fleet import FleetWorker
from router.fleet_placer import FleetPlacer
from router.placement import Demand

BLOCK = 64  # tokens; larger than in production, so that runs are short
ROOT = b"r" * 32
FINGERPRINT = WorkerFingerprint(ROOT, "bm", "sim", BLOCK, (1,))
POLICIES = ("prefix", "oracle", "load", "random")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulated workers are. Seconds and tokens."""

    num_prefill: int = 4
    num_decode: int = 4
    prefill_rate: float = 20_000.0
    step_seconds: float = 0.010
    step_per_sequence: float = 0.0002
    max_num_seqs: int = 256
    lag_seconds: float = 0.005
    hand_off_seconds: float = 0.010


@dataclass(frozen=True, slots=True)
class Workload:
    """Customers, and what they say; tokens."""

    working_set: float  # share of the prefill workers' KV
    num_customers: int = 150
    users_per_customer: int = 5
    system_tokens: int = 6016
    question_tokens: int = 192
    answer_tokens: int = 192
    num_turns: int = 4

    @property
    def working_set_tokens(self) -> float:
        """All system prompts and, on average, half of each user's chat."""
        chat = self.num_turns * (self.question_tokens + self.answer_tokens) / 2
        return self.num_customers * (self.system_tokens + self.users_per_customer * chat)

    def blocks_per_worker(self, machine: Machine) -> int:
        return int(self.working_set_tokens / self.working_set / machine.num_prefill / BLOCK)


@dataclass(slots=True)
class Request:
    """One turn: keys of prompt and answer, both whole blocks plus one token that is never cached."""

    arrived: float
    keys: list[bytes]
    num_prompt_blocks: int
    num_output_tokens: int
    prefill: "Prefill | None" = None
    decode: "Decode | None" = None
    first_token: float = 0.0
    num_hit_blocks: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_prompt_blocks * BLOCK + 1


class Keys:
    """Stands for PromptKeys: simulated prompts have keys and no tokens."""

    def __init__(self, keys: Sequence[bytes], num_tokens: int) -> None:
        self._keys = index_keys(keys)
        self.num_tokens = num_tokens

    def of(self, space: object, output: Sequence[int] = ()) -> list[bytes]:
        return self._keys


class Clock:
    """Virtual time and what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._count), call))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()


class Worker:
    """A pool, and the index that hears of it later."""

    role: WorkerRole

    def __init__(self, name: str, num_blocks: int, cluster: "Cluster") -> None:
        self.pool = BlockPool(num_blocks)
        self.cluster = cluster
        self.description = WorkerDescription(
            name, 1, self.role, name, "sim", FINGERPRINT, 1 << 20, num_blocks, cluster.machine.max_num_seqs, 8192, 1
        )
        cluster.index.register(WorkerRecord(name, name, self.role, 1))

    def take(self, keys: Sequence[bytes], num_blocks: int) -> tuple[list[int], int] | None:
        """Blocks for a sequence and how many of them are hits; None if there is no room."""
        held = self.pool.match(keys, [0] * len(keys), 1)
        new = self.pool.allocate(num_blocks - len(held))
        if new is None:
            self.pool.release(held)
            return None
        self.publish()
        return held + new, len(held)

    def commit(self, block_ids: list[int], keys: Sequence[bytes]) -> None:
        for position, key in enumerate(keys):
            block_ids[position] = self.pool.commit(block_ids[position], key, (0,))
        self.publish()

    def publish(self) -> None:
        events = self.pool.take_events()
        if not events:
            return
        name, index = self.description.worker_id, self.cluster.index

        def apply() -> None:
            for event in events:
                (index.store if event.kind == "stored" else index.remove)(name, index_keys(event.keys))

        if self.cluster.lag_seconds:
            self.cluster.clock.after(self.cluster.lag_seconds, apply)
        else:
            apply()


class Prefill(Worker):
    """One prompt after the other."""

    role: WorkerRole = "prefill"

    def __init__(self, name: str, num_blocks: int, cluster: "Cluster") -> None:
        super().__init__(name, num_blocks, cluster)
        self._queue: deque[Request] = deque()
        self._running: Request | None = None

    def load(self) -> LoadSnapshot:
        """As the engine counts: a waiting prompt in full, for nobody has looked up yet what it has of it."""
        queued = sum(each.num_prompt_tokens for each in self._queue)
        if self._running is not None:
            queued += self._running.num_prompt_tokens - self._running.num_hit_blocks * BLOCK
        return LoadSnapshot(
            num_running=int(self._running is not None),
            num_waiting=len(self._queue),
            num_queued_tokens=queued,
            num_free_blocks=self.pool.num_free,
        )

    def add(self, request: Request) -> None:
        self._queue.append(request)
        self._next()

    def _next(self) -> None:
        if self._running is not None or not self._queue:
            return
        request = self._queue[0]
        keys = request.keys[: request.num_prompt_blocks]
        taken = self.take(keys, request.num_prompt_blocks + 1)
        if taken is None:
            return  # blocks are held for a hand-off; its end comes back here
        self._queue.popleft()
        block_ids, request.num_hit_blocks = taken
        self._running = request
        uncached = request.num_prompt_tokens - request.num_hit_blocks * BLOCK

        def done() -> None:
            self.commit(block_ids, keys)
            request.first_token = self.cluster.clock.now
            self._running = None
            self.cluster.clock.after(self.cluster.machine.hand_off_seconds, handed_off)
            self._next()

        def handed_off() -> None:
            self.pool.release(block_ids)
            assert request.decode is not None
            request.decode.add(request)
            self._next()

        self.cluster.clock.after(uncached / self.cluster.machine.prefill_rate, done)


class Decode(Worker):
    """Continuous batching: each sequence gets a token per step, whose length grows with the batch."""

    role: WorkerRole = "decode"

    def __init__(self, name: str, num_blocks: int, cluster: "Cluster") -> None:
        super().__init__(name, num_blocks, cluster)
        self._waiting: deque[Request] = deque()
        self._num_running = 0

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            num_running=self._num_running, num_waiting=len(self._waiting), num_free_blocks=self.pool.num_free
        )

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._next()

    def _next(self) -> None:
        machine = self.cluster.machine
        while self._waiting and self._num_running < machine.max_num_seqs:
            request = self._waiting[0]
            taken = self.take(request.keys[: request.num_prompt_blocks], len(request.keys) + 1)
            if taken is None:
                return
            self._waiting.popleft()
            self._num_running += 1
            step = machine.step_seconds + machine.step_per_sequence * self._num_running

            def done(request: Request = request, block_ids: list[int] = taken[0]) -> None:
                self.commit(block_ids, request.keys)
                self.pool.release(block_ids)
                self._num_running -= 1
                self.cluster.finished(request)
                self._next()

            self.cluster.clock.after(request.num_output_tokens * step, done)


class Fleet:
    """What FleetPlacer asks of a fleet; loads are those of the last message."""

    def __init__(self) -> None:
        self._workers: dict[str, FleetWorker] = {}

    def see(self, workers: Sequence["Prefill | Decode"]) -> None:
        nowhere: Any = None
        self._workers = {
            each.description.worker_id: FleetWorker(each.description, each.load(), True, nowhere) for each in workers
        }

    def workers(self) -> Mapping[str, FleetWorker]:
        return self._workers


@dataclass(slots=True)
class Chat:
    """A user: the keys of all said so far, and the turn that is next."""

    customer: int
    keys: list[bytes]
    num_turns: int = 0
    busy: bool = False


@dataclass(slots=True)
class Cluster:
    """Workers, router and users; `run` returns what happened to the requests that arrived after the warm-up."""

    machine: Machine
    workload: Workload
    policy: str
    rate: float  # requests/s
    seed: int = 0
    clock: Clock = field(default_factory=Clock)
    index: MemoryIndex = field(default_factory=MemoryIndex)
    done: list[Request] = field(default_factory=list)
    arrived: list[Request] = field(default_factory=list)
    chat_of: dict[int, Chat] = field(default_factory=dict)

    @property
    def lag_seconds(self) -> float:
        return 0.0 if self.policy == "oracle" else self.machine.lag_seconds

    def run(self, warm_up: float, seconds: float) -> "Outcome":
        machine, workload, rng = self.machine, self.workload, Random(self.seed)
        num_blocks = workload.blocks_per_worker(machine)
        prefills = [Prefill(f"prefill-{n}", num_blocks, self) for n in range(machine.num_prefill)]
        decodes = [Decode(f"decode-{n}", 4 * num_blocks, self) for n in range(machine.num_decode)]
        by_name: dict[str, Any] = {each.description.worker_id: each for each in (*prefills, *decodes)}
        fleet: Any = Fleet()
        policy: Any = "prefix" if self.policy == "oracle" else self.policy
        placer = FleetPlacer(
            fleet, self.index, model="sim", policy=policy, rng=Random(self.seed), clock=lambda: self.clock.now
        )
        systems = [_chain(workload.system_tokens) for _ in range(workload.num_customers)]
        chats = [Chat(n // workload.users_per_customer, list(systems[n // workload.users_per_customer]))
                 for n in range(workload.num_customers * workload.users_per_customer)]  # fmt: skip

        def tell_load() -> None:
            fleet.see([*prefills, *decodes])
            self.clock.after(0.1, tell_load)

        def arrive() -> None:
            self.clock.after(rng.expovariate(self.rate), arrive)
            chat = rng.choice(chats)
            if chat.busy:  # the load is open: somebody else of the same customer begins a chat
                chat = Chat(chat.customer, list(systems[chat.customer]))
            request = self.turn(chat, systems)
            keys: Any = Keys(request.keys[: request.num_prompt_blocks], request.num_prompt_tokens)
            placement = placer.place(
                Demand((0,) * request.num_prompt_tokens, "", request.num_output_tokens, 1, keys=keys)
            )
            assert placement.prefill is not None
            request.decode = by_name[placement.decode.worker_id]
            by_name[placement.prefill.worker_id].add(request)

        tell_load()
        arrive()
        self.clock.run(warm_up)
        self.arrived.clear()
        self.done.clear()
        self.clock.run(warm_up + seconds)
        outcome = Outcome.of(self, warm_up + seconds, seconds)
        for each in by_name.values():
            each.pool.check_integrity()
        self.index.check_integrity()
        return outcome

    def turn(self, chat: Chat, systems: list[list[bytes]]) -> Request:
        workload = self.workload
        if chat.num_turns == workload.num_turns:
            chat.keys, chat.num_turns = list(systems[chat.customer]), 0
        chat.num_turns += 1
        chat.busy = True
        chat.keys += _chain(workload.question_tokens)
        num_prompt_blocks = len(chat.keys)
        chat.keys += _chain(workload.answer_tokens)
        request = Request(self.clock.now, list(chat.keys), num_prompt_blocks, workload.answer_tokens)
        self.chat_of[id(request)] = chat
        self.arrived.append(request)
        return request

    def finished(self, request: Request) -> None:
        self.chat_of.pop(id(request)).busy = False
        self.done.append(request)


def _chain(num_tokens: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(num_tokens // BLOCK)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests that arrived in the measured time. Those without a first token yet count with their wait."""

    policy: str
    working_set: float
    rate: float
    num_requests: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    output_tokens_per_second: float
    hit_rate: float

    @classmethod
    def of(cls, cluster: Cluster, now: float, seconds: float) -> "Outcome":
        waits = sorted((each.first_token or now) - each.arrived for each in cluster.arrived)
        begun = [each for each in cluster.arrived if each.first_token]
        prompt_tokens = sum(each.num_prompt_tokens for each in begun)

        def percentile(share: float) -> float:
            return waits[min(int(share * len(waits)), len(waits) - 1)]

        return cls(
            cluster.policy,
            cluster.workload.working_set,
            cluster.rate,
            len(waits),
            percentile(0.5),
            percentile(0.9),
            percentile(0.99),
            sum(each.num_output_tokens for each in cluster.done) / seconds,
            sum(each.num_hit_blocks * BLOCK for each in begun) / max(prompt_tokens, 1),
        )


def sustained_rate(machine: Machine, workload: Workload, warm_up: float, seconds: float) -> float:
    """The highest rate at which `prefix` keeps nine of ten first tokens within a second, to 5 %."""
    # Without any cached answer, and with everything else cached.
    least, most = workload.system_tokens, workload.question_tokens + workload.answer_tokens / 2
    low, high = (machine.num_prefill * machine.prefill_rate / tokens for tokens in (2 * least, most))
    while high / low > 1.05:
        rate = (low * high) ** 0.5
        outcome = Cluster(machine, workload, "prefix", rate).run(warm_up, seconds)
        low, high = (rate, high) if outcome.ttft_p90 <= 1.0 else (low, rate)
    return low


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """TTFT by policy (needs matplotlib: the extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sets = sorted({each.working_set for each in outcomes})
    figure, panels = plt.subplots(1, len(sets), figsize=(5 * len(sets), 4), sharey=True, squeeze=False)
    for panel, working_set in zip(panels[0], sets, strict=True):
        rows = [each for each in outcomes if each.working_set == working_set]
        for offset, name in enumerate(("ttft_p50", "ttft_p90", "ttft_p99")):
            positions = [number + 0.27 * (offset - 1) for number in range(len(rows))]
            panel.bar(positions, [getattr(each, name) for each in rows], 0.27, label=name.replace("_", " "))
        panel.set_xticks(range(len(rows)), [f"{each.policy}\nhit {each.hit_rate:.0%}" for each in rows])
        panel.set_yscale("log")
        panel.set_title(f"working set {working_set:.0%} of the KV, {rows[0].rate:.1f} requests/s")
    panels[0][0].set_ylabel("seconds")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the customers, a short time")
    parser.add_argument("--out", type=Path, help="write a CSV")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.add_argument("--rate", type=float, help="requests/s, instead of 90 %% of what `prefix` sustains")
    parser.add_argument("--prefill-rate", type=float, default=20_000.0, help="tokens/s of one prefill worker")
    parser.add_argument("--step-ms", type=float, default=10.0, help="a decode step of one sequence")
    parser.add_argument("--step-per-seq-ms", type=float, default=0.2, help="what each further sequence adds")
    parser.add_argument("--lag-ms", type=float, default=5.0, help="from a change of a cache to the router's view")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=[*POLICIES, "round_robin"])
    options = parser.parse_args()
    logging.getLogger("router").setLevel(logging.WARNING)
    machine = Machine(
        prefill_rate=options.prefill_rate,
        step_seconds=options.step_ms / 1e3,
        step_per_sequence=options.step_per_seq_ms / 1e3,
        lag_seconds=options.lag_ms / 1e3,
    )
    customers, search, measured = (
        (30, (10.0, 10.0), (20.0, 60.0)) if options.quick else (150, (90.0, 60.0), (120.0, 300.0))
    )
    outcomes = []
    head = (
        f"{'policy':<12}{'set':>5}{'req/s':>8}{'n':>7}{'p50 s':>9}{'p90 s':>9}{'p99 s':>9}{'tokens/s':>10}{'hits':>7}"
    )
    print(head)
    for working_set in (0.37, 0.73):
        workload = Workload(working_set, customers)
        rate = options.rate or 0.9 * sustained_rate(machine, workload, *search)
        for policy in options.policies:
            each = Cluster(machine, workload, policy, rate).run(*measured)
            outcomes.append(each)
            print(
                f"{each.policy:<12}{each.working_set:>5.0%}{each.rate:>8.1f}{each.num_requests:>7}{each.ttft_p50:>9.3f}"
                f"{each.ttft_p90:>9.3f}{each.ttft_p99:>9.3f}{each.output_tokens_per_second:>10.0f}{each.hit_rate:>7.1%}",
                flush=True,
            )
    if options.out:
        about = {**describe(), **{f"machine_{name}": value for name, value in asdict(machine).items()}}
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*about, "customers", *(each.name for each in fields(Outcome))])
            for outcome in outcomes:
                writer.writerow([*about.values(), customers, *asdict(outcome).values()])
    if options.plot:
        plot(outcomes, options.plot)


if __name__ == "__main__":
    main()
