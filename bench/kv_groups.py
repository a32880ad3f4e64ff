"""What KV groups save: bytes held by sequences of Gemma 3's shapes, and how much of it no later token can read.

waste = bytes held that no future query can read / bytes held

A slot is readable if it lies in the window of the next token or of a later one, or is still to be written. Padding (a
place in a block for a layer that is not there) is waste too. Pure bookkeeping, no weights: each sequence is prefilled
in chunks and decodes to its end; every step is counted.
"""

import argparse
from dataclasses import dataclass

from engine.block_tables import BlockTables
from engine.kv_cache import KvCache
from engine.request import EngineRequest
from engine.sequence import Sequence
from kvstore.block_pool import BlockPool
from kvstore.kv_groups import KvGroups, plan_groups
from pagewire.sampling import SamplingParams

BLOCK, CHUNK = 16, 512


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers; one in six sees everything. `cell`: bytes of a token's keys and values in one layer."""

    name: str
    num_layers: int
    window: int
    cell: int

    @property
    def windows(self) -> list[int | None]:
        return [None if layer % 6 == 5 else self.window for layer in range(self.num_layers)]


SHAPES = (  # kv heads x head size x K and V x bfloat16
    Shape("gemma3-270m", 18, 512, 1 * 256 * 4),
    Shape("gemma3-1b", 26, 512, 1 * 256 * 4),
    Shape("gemma3-4b", 34, 1024, 4 * 256 * 4),
    Shape("gemma3-12b", 48, 1024, 8 * 256 * 4),
    Shape("gemma3-27b", 62, 1024, 16 * 128 * 4),
)


def readable_slots(shape: Shape, groups: KvGroups, sequence: Sequence) -> int:
    """Of the slots that the sequence holds in all layers those that some later token reads."""
    position, total = sequence.num_computed_tokens, 0
    for group, table in zip(groups.groups, sequence.tables, strict=True):
        end = len(table) * BLOCK
        for layer in group.layers:
            window = shape.windows[layer]
            total += end - (0 if window is None else max(0, position - window + 1))
    return total


def measure(shape: Shape, num_tokens: int, *, one: bool) -> tuple[float, float]:
    """Mean waste over all steps, and the bytes held in the last one."""
    groups = plan_groups(shape.windows, block_size=BLOCK, max_chunk=CHUNK, one=one)
    pool = BlockPool(groups.num_pool_blocks(num_tokens), num_groups=len(groups))
    tables = BlockTables(KvCache(pool, b"r" * 32, BLOCK, groups))
    request = EngineRequest("r", (5,) * (num_tokens // 2), SamplingParams(max_tokens=num_tokens // 2))
    sequence = Sequence(request, 0, 0, [5] * num_tokens)
    per_block = groups.layers_per_block * BLOCK
    held = wasted = 0
    while sequence.num_computed_tokens < num_tokens:
        step = CHUNK if sequence.num_computed_tokens < num_tokens // 2 else 1
        end = min(num_tokens, sequence.num_computed_tokens + step)
        assert tables.grow(sequence, end, [])
        tables.commit(sequence, end)
        slots = pool.num_referenced * per_block
        held += slots
        wasted += slots - readable_slots(shape, groups, sequence)
    return wasted / held, pool.num_referenced * per_block * shape.cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 32768], help="lengths of sequences")
    print("model,tokens,groups,waste,MiB,one_group_waste,one_group_MiB,ratio")
    for shape in SHAPES:
        for num_tokens in parser.parse_args().tokens:
            num_groups = len(plan_groups(shape.windows, block_size=BLOCK, max_chunk=CHUNK))
            waste, num_bytes = measure(shape, num_tokens, one=False)
            one_waste, one_bytes = measure(shape, num_tokens, one=True)
            print(
                f"{shape.name},{num_tokens},{num_groups},{waste:.2%},{num_bytes / 2**20:.1f},{one_waste:.2%},"
                f"{one_bytes / 2**20:.1f},{one_bytes / num_bytes:.2f}"
            )


if __name__ == "__main__":
    main()
