"""Which block a tier should evict: plain LRU against LRU by cost, on the real books, in a simulation of one worker.

    .venv/bin/python bench/tier_eviction.py [--quick] [--out FILE]

One prompt after the other passes a device pool (`BlockPool`), a host tier and a disk tier (`TierBook`), with write-back
and loads as in `engine/tiers`. Counted are the seconds that a prompt's blocks take: nothing on the device, a copy from
host or disk, or to be computed, where attention makes deep blocks dearer. Workloads: the chats of `bench/routing`, and
documents of 2 k to 128 k tokens that are asked about again and again, some far more often than others. Policies: `lru`;
blocks that are dearer by their `depth`, by their `uses`, by `both`; and what the `engine` does, which also knows what a
slower tier has.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.routing.workload import BLOCK, Users, Workload
from engine.rates import Prior, Rate
from engine.tiers.eviction import HALF_CONTEXT, SlowerTier, cost_of
from engine.tiers.load_costs import LoadCosts
from kvstore.block_pool import BlockPool
from kvstore.eviction_order import CostOf
from kvstore.tier_block import Entry, TierBlock
from kvstore.tier_book import TierBook

COMPUTE = BLOCK / 20_000.0  # seconds for a block at the beginning of a prompt
LOAD = {"host": 8 * 2**20 / 20e9, "disk": 8 * 2**20 / 6e9}  # seconds for a block of 128 KiB a token
POLICIES = ("lru", "depth", "uses", "both", "engine")


@dataclass(frozen=True, slots=True)
class Row:
    """Sizes are shares of the working set; seconds are means per prompt, shares are of prompt blocks."""

    workload: str
    host: float
    disk: float
    policy: str
    seconds: float
    device_share: float
    host_share: float
    disk_share: float
    computed_share: float


def compute_seconds(depth: int) -> float:
    """Of block number `depth` of a prompt."""
    return COMPUTE * (1 + depth * BLOCK / HALF_CONTEXT)


class Worker:
    """Write-through tiers below a pool, as `engine/tiers` has them; either may have no slots."""

    def __init__(self, device: int, host: int, disk: int, policy: str) -> None:
        self.pool = BlockPool(device)
        self.tiers = {name: TierBook(size) for name, size in (("host", host), ("disk", disk)) if size}
        costs = LoadCosts(BLOCK, 1, Prior(0.0, 1 / LOAD["disk"]), Rate(BLOCK / COMPUTE, 1e9))
        slower = [SlowerTier(costs, self.tiers["disk"].holds)] if "disk" in self.tiers else []
        for name, book in self.tiers.items():
            book.price(_cost_of(policy, slower if name == "host" else []))
        self.seconds = 0.0
        self.num_blocks = dict.fromkeys(("device", "host", "disk", "computed"), 0)

    def serve(self, keys: Sequence[bytes], num_prompt_blocks: int) -> None:
        """A prompt and its answer; the pool's own order of things."""
        held = self.pool.match(keys, [0] * len(keys), 1)
        self.num_blocks["device"] += len(held)
        for depth in range(len(held), num_prompt_blocks):
            name = next((name for name, book in self.tiers.items() if book.holds(keys[depth])), "computed")
            self.num_blocks[name] += 1
            self.seconds += LOAD.get(name) or compute_seconds(depth)
        for book in self.tiers.values():
            book.touch(keys[:num_prompt_blocks])
        new = self.pool.allocate(len(keys) - len(held))
        assert new is not None
        held += new
        for depth, key in enumerate(keys):
            held[depth] = self.pool.commit(held[depth], key, (0,))
            block = TierBlock(key, keys[depth - 1] if depth else None, (0,))
            for book in self.tiers.values():
                entry = book.begin_store(block, 0.0)
                if entry is not None:
                    book.finish_store(entry, 0)
        self.pool.release(held)


def _cost_of(policy: str, slower: Sequence[SlowerTier]) -> CostOf:
    def cost(entry: Entry) -> float:
        depth = 1 + entry.depth * BLOCK / HALF_CONTEXT
        return {"lru": 1.0, "depth": depth, "uses": float(entry.num_uses), "both": depth * entry.num_uses}[policy]

    return cost if policy != "engine" else partial(cost_of, block_size=BLOCK, slower=slower)


def chats(rng: Random) -> tuple[Iterator[tuple[list[bytes], int]], float]:
    """The routing workload: prompts with their answers, and the blocks of its working set."""
    workload = Workload(1.0)

    def some(num_tokens: int) -> list[bytes]:
        return [os.urandom(16) for _ in range(num_tokens // BLOCK)]

    def ask() -> Iterator[tuple[list[bytes], int]]:
        users = Users(workload, some)
        while True:
            chat = users.ask(rng)
            num_prompt_blocks = len(chat.said)
            chat.said += some(workload.answer_tokens)
            chat.busy = False
            yield list(chat.said), num_prompt_blocks

    return ask(), workload.working_set_tokens / BLOCK


def documents(rng: Random) -> tuple[Iterator[tuple[list[bytes], int]], float]:
    """Documents and a new question each time; lengths and popularities spread over two orders of magnitude."""
    lengths = [int(2_048 * 64 ** rng.random()) // BLOCK for _ in range(300)]
    texts = [[os.urandom(16) for _ in range(length)] for length in lengths]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(len(texts))]

    def ask() -> Iterator[tuple[list[bytes], int]]:
        while True:
            (text,) = rng.choices(texts, weights)
            yield [*text, *(os.urandom(16) for _ in range(4))], len(text) + 2

    return ask(), float(sum(lengths))


def measure(name: str, host: float, disk: float, policy: str, num_prompts: int) -> Row:
    """The second half of the prompts counts."""
    prompts, working_set = WORKLOADS[name](Random(1))
    worker = Worker(max(int(0.1 * working_set), 2_100), int(host * working_set), int(disk * working_set), policy)
    for number in range(num_prompts):
        if number == num_prompts // 2:
            worker.seconds, worker.num_blocks = 0.0, dict.fromkeys(worker.num_blocks, 0)
        worker.serve(*next(prompts))
    for book in worker.tiers.values():
        book.check_integrity()
    total = sum(worker.num_blocks.values())
    shares = [worker.num_blocks[each] / total for each in ("device", "host", "disk", "computed")]
    return Row(name, host, disk, policy, worker.seconds / (num_prompts - num_prompts // 2), *shares)


WORKLOADS = {"chats": chats, "documents": documents}
SIZES = ((0.37, 0.0), (0.73, 0.0), (0.37, 0.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the prompts")
    parser.add_argument("--prompts", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    num_prompts = arguments.prompts // 5 if arguments.quick else arguments.prompts
    rows = []
    print("workload   host  disk policy  s/prompt  of lru  device   host   disk  computed")
    for name in WORKLOADS:
        for host, disk in SIZES:
            lru = 0.0
            for policy in POLICIES:
                row = measure(name, host, disk, policy, num_prompts)
                rows.append(row)
                lru = lru or row.seconds
                print(
                    f"{row.workload:<9} {row.host:>5.2f} {row.disk:>5.2f} {row.policy:<6} {row.seconds:>9.4f} "
                    f"{row.seconds / lru:>7.3f} {row.device_share:>7.3f} {row.host_share:>6.3f} "
                    f"{row.disk_share:>6.3f} {row.computed_share:>9.3f}",
                    flush=True,
                )
    if arguments.out is not None:
        with arguments.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(Row))
            writer.writerows(astuple(row) for row in rows)


if __name__ == "__main__":
    main()
