"""The block pool: exact ids and eviction order, canonical blocks, and prefix-closedness on random walks."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block_pool import BlockPool
from kvstore.events import CacheEvent
from kvstore.hashing import block_keys

BLOCK_SIZE = 2
ROOT = b"r" * 32


def _keys(tokens: list[int]) -> list[bytes]:
    return block_keys(ROOT, tokens, BLOCK_SIZE)


def _fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocates and commits the full blocks of `tokens`, as a sequence that computes them does."""
    keys = _keys(tokens)
    ids = pool.allocate(len(keys))
    assert ids is not None
    return [
        pool.commit(b, k, tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
        for i, (b, k) in enumerate(zip(ids, keys, strict=True))
    ]


def test_allocates_in_order_and_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_referenced) == (1, 3)
    assert pool.allocate(1) == [3]
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_blocks_without_content_are_used_again_first() -> None:
    pool = BlockPool(4)
    cached = _fill(pool, [1, 2])
    empty = pool.allocate(1)
    assert (cached, empty) == ([0], [1])
    pool.release([0, 1])
    pool.check_integrity()
    assert pool.allocate(4) == [1, 2, 3, 0]
    assert pool.num_evictions == 1


def test_tails_are_evicted_before_heads_and_the_least_recently_used_chain_first() -> None:
    pool = BlockPool(6)
    old, new = _fill(pool, [1, 2, 3, 4, 5, 6]), _fill(pool, [7, 8, 9, 10, 11, 12])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(4) == [old[2], old[1], old[0], new[2]]
    pool.check_integrity()


def test_a_hit_makes_a_chain_recent() -> None:
    pool = BlockPool(4)
    old, new = _fill(pool, [1, 2, 3, 4]), _fill(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    hit = pool.match(_keys([1, 2, 3, 4]), [1, 2, 3, 4], BLOCK_SIZE)
    assert hit == old
    pool.release(hit)
    assert pool.allocate(2) == [new[1], new[0]]


def test_match_takes_the_longest_prefix_and_references() -> None:
    pool = BlockPool(4)
    ids = _fill(pool, [1, 2, 3, 4])
    tokens = [1, 2, 3, 4, 5, 6]
    assert pool.match(_keys(tokens), tokens, BLOCK_SIZE) == ids
    assert [pool.ref_count(b) for b in ids] == [2, 2]
    assert pool.match(_keys([9, 9, 3, 4]), [9, 9, 3, 4], BLOCK_SIZE) == []


def test_what_was_free_before_it_was_borrowed_is_no_release() -> None:
    pool = BlockPool(4)
    free, held = _fill(pool, [1] * BLOCK_SIZE), _fill(pool, [2] * BLOCK_SIZE)
    pool.release(free)
    both = [*free, *held]
    borrowed = pool.free_among(both)
    pool.acquire(both)
    pool.release(held)  # by whoever held it: the borrower's is the last reference
    before = pool.num_releases
    pool.release(both, borrowed)
    assert pool.num_releases == before + 1
    assert pool.num_free == 4


def test_match_compares_token_ids() -> None:
    pool = BlockPool(4)
    _fill(pool, [1, 2])
    assert pool.match(_keys([1, 2]), [1, 3], BLOCK_SIZE) == []
    assert pool.num_referenced == 1


def test_commit_exchanges_a_duplicate_for_the_cached_block() -> None:
    pool = BlockPool(4)
    (first,) = _fill(pool, [1, 2])
    (second,) = pool.allocate(1) or []
    assert pool.commit(second, _keys([1, 2])[0], [1, 2]) == first
    assert (pool.ref_count(first), pool.ref_count(second)) == (2, 0)
    assert pool.commit(first, _keys([1, 2])[0], [1, 2]) == first
    pool.check_integrity()


def test_commit_revives_a_free_canonical_block() -> None:
    pool = BlockPool(2)
    (first,) = _fill(pool, [1, 2])
    pool.release([first])
    assert pool.allocate(1) == [1]
    assert pool.commit(1, _keys([1, 2])[0], [1, 2]) == first
    assert pool.ref_count(first) == 1
    pool.check_integrity()


def test_generations_count_hand_outs_also_in_outside_memory() -> None:
    outside = np.zeros(2, dtype=np.uint64)
    pool = BlockPool(2, generations=outside)
    pool.release(pool.allocate(2) or [])
    pool.allocate(1)
    assert outside.tolist() == [2, 1]
    assert pool.generation(0) == 2
    hit = _fill(BlockPool(1, generations=outside[1:]), [1, 2])
    assert (hit, outside[1]) == ([0], 2)


def test_misuse_raises_and_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="holds nothing"):
        pool.acquire([0])
    with pytest.raises(ValueError, match="nobody references"):
        pool.release([0])
    with pytest.raises(ValueError, match="nobody references"):
        pool.commit(0, b"k", [1])
    (block,) = _fill(pool, [1, 2])
    with pytest.raises(ValueError, match="second key"):
        pool.commit(block, b"k", [1])
    with pytest.raises(ValueError, match="shape"):
        BlockPool(3, generations=np.zeros(2, dtype=np.uint64))
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
    pool.check_integrity()


def test_events_in_order_and_only_once() -> None:
    pool = BlockPool(2)
    ids = _fill(pool, [1, 2, 3, 4])
    one, two = _keys([1, 2, 3, 4])
    assert pool.take_events() == [CacheEvent("stored", (one, two))]
    assert pool.take_events() == []
    pool.release(ids)
    (three,) = _keys([5, 6])
    _fill(pool, [5, 6])
    assert pool.take_events() == [CacheEvent("removed", (two,)), CacheEvent("stored", (three,))]


def test_reset_of_an_idle_pool_clears_everything() -> None:
    """CASES C4."""
    pool = BlockPool(3)
    pool.release(_fill(pool, [1, 2, 3, 4]))
    assert pool.reset() == 2
    assert pool.take_events() == [CacheEvent("cleared")]
    assert (pool.cached_keys(), pool.match(_keys([1, 2]), [1, 2], BLOCK_SIZE)) == ([], [])
    pool.check_integrity()


def test_reset_keeps_what_is_referenced() -> None:
    pool = BlockPool(4)
    held, free = _fill(pool, [1, 2]), _fill(pool, [3, 4])
    pool.release(free)
    pool.take_events()
    assert pool.reset() == 1
    assert pool.take_events() == [CacheEvent("removed", tuple(_keys([3, 4])))]
    assert pool.cached_keys() == _keys([1, 2])
    pool.release(held)
    pool.check_integrity()


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_caching=False)
    ids = _fill(pool, [1, 2])
    pool.release(ids)
    assert (pool.num_cached, pool.match(_keys([1, 2]), [1, 2], BLOCK_SIZE), pool.take_events()) == (0, [], [])
    pool.check_integrity()


def test_check_integrity_finds_broken_books() -> None:
    pool = BlockPool(2)
    pool._ref_counts[0] = 1
    with pytest.raises(AssertionError, match="free list"):
        pool.check_integrity()
    pool = BlockPool(2)
    pool._keys[0] = b"k"
    with pytest.raises(AssertionError, match="keys and blocks"):
        pool.check_integrity()


@dataclass
class _Walker:
    """A sequence: looks its prefix up, then computes block after block, and ends at some time."""

    tokens: list[int]
    table: list[int] = field(default_factory=list)
    num_committed: int = 0


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_blocks=st.integers(3, 10))
def test_what_is_cached_is_prefix_closed_whatever_happens(data: st.DataObject, num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    parents: dict[bytes, bytes | None] = {}
    walkers: list[_Walker] = []
    mirror: set[bytes] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["start", "grow", "grow", "commit", "commit", "end", "fork", "reset"]))
        walker = data.draw(st.sampled_from(walkers)) if walkers else None
        if action == "start" or walker is None:
            # Few distinct tokens: chains share heads, and the same block is computed twice at a time.
            tokens = [data.draw(st.integers(0, 1)) for _ in range(BLOCK_SIZE * data.draw(st.integers(1, 4)))]
            keys = _keys(tokens)
            parents.update(zip(keys, [None, *keys[:-1]], strict=True))
            table = pool.match(keys, tokens, BLOCK_SIZE)
            walkers.append(_Walker(tokens, table, len(table)))
        elif action == "grow":
            walker.table += pool.allocate(1) or []
        elif action == "commit" and walker.num_committed < min(len(walker.table), len(walker.tokens) // BLOCK_SIZE):
            i = walker.num_committed
            own = walker.tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            walker.table[i] = pool.commit(walker.table[i], _keys(walker.tokens)[i], own)
            walker.num_committed += 1
        elif action == "fork":
            shared = walker.table[: walker.num_committed]
            pool.acquire(shared)
            walkers.append(_Walker(walker.tokens, list(shared), len(shared)))
        elif action == "end":
            pool.release(walker.table)
            walkers.remove(walker)
        elif action == "reset":
            pool.reset()
        pool.check_integrity()
        cached = set(pool.cached_keys())
        assert all(parents[key] is None or parents[key] in cached for key in cached)
        for event in pool.take_events():
            mirror = set() if event.kind == "cleared" else mirror
            mirror = mirror | set(event.keys) if event.kind == "stored" else mirror - set(event.keys)
        assert mirror == cached
    for walker in walkers:
        pool.release(walker.table)
    assert pool.num_free == num_blocks
    pool.check_integrity()
