"""What a block in a tier is worth: how often it was of use, times what it costs to have it again. Pure.

    compute = 1 + tokens before it / HALF_CONTEXT                   attention makes deep blocks dearer
    cost    = uses · min(compute, what loading it takes from a slower tier that has it too)

Neither factor alone is better than LRU on every workload of `bench/tier_eviction.py`; both together are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.tiers.load_costs import LoadCosts
from kvstore.tier_block import Entry

HALF_CONTEXT = 30_000
"""Tokens of context whose attention takes as many operations as all the rest of a token, parameters / (2 · layers ·
heads · head size): 15 k for a model of 1 B, 30 k for 8 B, 53 k for 70 B. Only the order of magnitude matters."""
MAX_USES = 16
"""More do not count, so that what was popular once is gone after a while."""


@dataclass(frozen=True, slots=True)
class SlowerTier:
    """Where a block may be too. `holds` may be wrong: then a block goes that had better stayed."""

    costs: LoadCosts
    holds: Callable[[bytes], bool]


def cost_of(entry: Entry, block_size: int, slower: Sequence[SlowerTier] = ()) -> float:
    """In units of computing the first block of a chain; at least 0."""
    compute = 1 + entry.depth * block_size / HALF_CONTEXT
    load = min((each.costs.share_of_computing for each in slower if each.holds(entry.block.key)), default=compute)
    return min(entry.num_uses, MAX_USES) * min(compute, load)
