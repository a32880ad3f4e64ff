"""How often the index promises what the worker has lost meanwhile: under load with constant evictions, and after it.

    .venv/bin/python bench/stale_hits.py --quick              a minute, prints a table
    .venv/bin/python bench/stale_hits.py --out FILE           longer, and a CSV

Real processes: `pagewire up` with 2P2D, a tiny model, an embedded Valkey, the policy `prefix`, no fetches. Multi-turn
chats come as an open load, first with pools that hold more than is in use, then with pools of two thirds of it, so that
something is evicted all the time. What counts is how long the router's knowledge is old (the index's lag and the way to
the worker) against how long a block stays unused before it is evicted, so the pools hold a hundred prompts, not ten; on
a busy machine the lag is large. A hit is expected where the index has leading blocks of the prompt on the device of
the worker that prefills, and stale where that one finds fewer: evicted between the router's choice and the request's
admission (its queue and the index's lag). Afterwards nothing happens for some seconds, and every chat goes on once
more, one after the other: then there must be no stale hit. The counts are the router's own metrics.

Goal: below 0.1 % of the expected hits under load at each size, none at rest; the default time gives over a thousand
of them, so that one is less. Exits with 1 if it is missed.
"""

import argparse
import asyncio
import csv
import re
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import describe
from bench.routing.real import RealRun
from bench.routing.workload import Chat, Users, Workload
from pagewire import AsyncClient

GOAL = 0.001
QUIET_SECONDS = 3.0
NUM_AT_REST = 60
WORKING_SETS = (0.73, 1.5)


@dataclass(frozen=True, slots=True)
class Row:
    """Counts of one phase; tokens are those that stale hits promised in vain."""

    working_set: float
    phase: str
    requests: int
    expected_hits: int
    stale_hits: int
    stale_tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def share(self) -> float:
        return self.stale_hits / max(1, self.expected_hits)


@dataclass(slots=True)
class Run:
    """One system, loaded and left alone."""

    workload: Workload
    rate: float
    directory: Path
    seed: int

    def run(self, warm_up: float, seconds: float) -> list[Row]:
        real = RealRun(self.workload, "prefix", self.rate, self.directory, self.seed)
        with real.system() as (target, metrics_port):
            return asyncio.run(self._run(real, target, metrics_port, warm_up, seconds))

    async def _run(self, real: RealRun, target: str, port: int, warm_up: float, seconds: float) -> list[Row]:
        client, rng, words = AsyncClient(target), Random(self.seed), Random(self.seed + 1)
        vocab_size = (await client.list_models())[0].vocab_size

        def say(num_tokens: int) -> list[int]:
            return [words.randrange(10, vocab_size - 10) for _ in range(num_tokens)]

        users, chats = Users(self.workload, say), dict[int, Chat[int]]()
        clock, tasks = asyncio.get_running_loop().time, list[asyncio.Task[object]]()
        rows = []
        for phase, duration in (("warm-up", warm_up), ("load", seconds)):
            before, num_before, until = await counts(port), len(tasks), clock() + duration
            while clock() < until:
                chat = users.ask(rng)
                chats[id(chat)] = chat
                tasks.append(asyncio.create_task(real.turn(client, chat, say(1))))
                await asyncio.sleep(rng.expovariate(self.rate))
            if phase == "load":
                await asyncio.gather(*tasks)
                rows.append(self._row(phase, len(tasks) - num_before, before, await counts(port)))
        await asyncio.sleep(QUIET_SECONDS)
        before, num_asked = await counts(port), 0
        for chat in list(chats.values())[-NUM_AT_REST:]:
            await real.turn(client, chat, say(1))
            await asyncio.sleep(0.05)  # the workers' events of this turn
            num_asked += 1
        rows.append(self._row("rest", num_asked, before, await counts(port)))
        await client.close()
        return rows

    def _row(self, phase: str, requests: int, before: Mapping[str, int], after: Mapping[str, int]) -> Row:
        moved = {name: after[name] - before[name] for name in after}
        return Row(self.workload.working_set, phase, requests, *(moved[name] for name in NAMES))


NAMES = {
    "expected_hits": "pagewire:expected_hits_total",
    "stale_hits": "pagewire:stale_hits_total",
    "stale_tokens": "pagewire:stale_hit_tokens_total",
    "prompt_tokens": "vllm:prefix_cache_queries_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
}


async def counts(port: int) -> dict[str, int]:
    """The router's, whose metrics port this is."""

    def read() -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            text = page.read().decode()
        found = {
            name: re.findall(rf"^{metric}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", text, re.MULTILINE)
            for name, metric in NAMES.items()
        }
        return {name: int(sum(map(float, values))) for name, values in found.items()}

    return await asyncio.to_thread(read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 s of load for each size")
    parser.add_argument("--rate", type=float, default=6.0, help="requests/s")
    parser.add_argument("--customers", type=int, default=96, help="each with a system prompt and three users")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write a CSV")
    options = parser.parse_args()
    seconds, about, rows = 20.0 if options.quick else options.seconds, describe(), list[Row]()
    print(f"{about['hardware']}, {about['cpus']} CPUs, load {about['load']}")
    print("working set  phase  requests  expected  stale  share     stale tokens  hit rate")
    with tempfile.TemporaryDirectory(prefix="pagewire-stale-") as directory:
        for working_set in WORKING_SETS:
            workload = Workload(
                working_set, options.customers, 3, system_tokens=960, question_tokens=64, answer_tokens=64
            )
            for row in Run(workload, options.rate, Path(directory), options.seed).run(seconds / 2, seconds):
                rows.append(row)
                print(
                    f"{row.working_set:>11.2f}  {row.phase:<5}  {row.requests:>8}  {row.expected_hits:>8}  "
                    f"{row.stale_hits:>5}  {row.share:>7.3%}  {row.stale_tokens:>12}  {row.hit_rate:>8.1%}",
                    flush=True,
                )
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*about, *asdict(rows[0])])
            writer.writeheader()
            writer.writerows({**about, **asdict(row)} for row in rows)
    loads, rests = ([row for row in rows if row.phase == phase] for phase in ("load", "rest"))
    if any(row.share >= GOAL for row in loads) or any(row.stale_hits or not row.expected_hits for row in rests):
        raise SystemExit("the goal was missed: below 0.1 % of the expected hits under load at each size, none at rest")


if __name__ == "__main__":
    main()
