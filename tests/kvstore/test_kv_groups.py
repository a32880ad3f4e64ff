"""How layers are divided into KV groups, what sequences hold of them, and a pool whose group 0 slides."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block_pool import BlockPool
from kvstore.hashing import block_keys
from kvstore.kv_groups import KvGroups, plan_groups


def gemma3(num_sliding: int, num_full: int, window: int) -> KvGroups:
    """Every sixth layer sees everything."""
    windows = [None if i % 6 == 5 else window for i in range(num_sliding + num_full)]
    assert windows.count(None) == num_full
    return plan_groups(windows, block_size=16, max_chunk=512)


@pytest.mark.parametrize(
    ("layers", "num_groups", "layers_per_block"),
    [
        ((15, 3, 512), 6, 3),
        ((22, 4, 512), 13, 2),
        ((29, 5, 1024), 7, 5),
        ((40, 8, 1024), 6, 8),
        ((52, 10, 1024), 31, 2),
    ],
)
def test_gemma_3(layers: tuple[int, int, int], num_groups: int, layers_per_block: int) -> None:
    """270M, 1B, 4B, 12B and 27B: few groups, and hardly a place for a layer that is not used."""
    groups = gemma3(*layers)
    assert (len(groups), groups.layers_per_block) == (num_groups, layers_per_block)
    assert groups.groups[0].window is None
    assert sorted(layer for group in groups.groups for layer in group.layers) == list(range(sum(layers[:2])))
    assert groups.place(5) == (0, 0)


def test_one_group_is_what_it_was() -> None:
    for groups in (
        plan_groups([None] * 3, block_size=4, max_chunk=8),
        plan_groups([5] * 3, block_size=4, max_chunk=8, one=True),
    ):
        assert (groups.is_plain, groups.slides, groups.layout) == (True, False, "0:full:3")
        assert (groups.num_pool_blocks(9), groups.longest_sequence(3, 100), groups.capacity(7)) == (3, 12, 7)
    assert plan_groups([None, 5, 5], block_size=4, max_chunk=8).layout == "0:full:0;1:sliding5:1;2:sliding5:2"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_deepest_hit_whose_windows_are_whole(seed: int) -> None:
    """Compared with trying every depth."""
    rng = Random(seed)
    windows = [None, *(rng.randint(4, 30) for _ in range(rng.randint(1, 3)))]
    groups = plan_groups(windows, block_size=4, max_chunk=8)
    there = {(group, i) for group in range(len(groups)) for i in range(40) if rng.random() < rng.choice([0.6, 0.95])}

    def first_missing(group: int, first: int, end: int) -> int | None:
        return next((i for i in range(first, end) if (group, i) not in there), None)

    def is_whole(depth: int) -> bool:
        firsts = list(enumerate(groups.first_blocks(4 * depth)))[1:]
        return all((group, i) in there for group, first in firsts for i in range(first, depth))

    most = rng.randint(0, 40)
    assert groups.deepest_whole(most, first_missing) == max(depth for depth in range(most + 1) if is_whole(depth))


def test_where_all_windows_are_gone_few_blocks_are_looked_at() -> None:
    """One for each window, not one for each block of the chain."""
    groups, num_asked = plan_groups([None, 512], block_size=16, max_chunk=512), 0

    def first_missing(group: int, first: int, end: int) -> int | None:
        nonlocal num_asked
        num_asked += 1
        return first if first < end else None

    assert groups.deepest_whole(8192, first_missing) == 0
    assert num_asked <= 8192 // 32 + 1


@given(window=st.integers(1, 40), size=st.integers(1, 17), chunk=st.integers(1, 40), start=st.integers(0, 100))
def test_no_more_is_held_than_said(window: int, size: int, chunk: int, start: int) -> None:
    groups = plan_groups([None, window], block_size=size, max_chunk=chunk)
    end = start + chunk
    held = groups.num_blocks_for(end) - groups.first_block(1, start)
    most = groups.most_held(1)
    assert most is not None
    assert held <= most
    assert groups.num_pool_blocks(end) >= groups.num_blocks_for(end) + min(held, groups.num_blocks_for(end))
    room = groups.num_pool_blocks(end)
    assert groups.longest_sequence(room, 1000) >= end
    depth = groups.deepest_hit(room, 50)
    assert groups.num_hit_blocks(depth) <= room
    assert depth == 50 or groups.num_hit_blocks(depth + 1) > room
    # Where a hit may begin again, everything is there that the token there sees.
    assert groups.first_block(1, groups.restart(end)) <= groups.first_block(1, end)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_a_sliding_group_0_says_is_prefix_closed(seed: int) -> None:
    """Chains that give back their beginnings; who follows the events never sees a block without those before it."""
    rng, size, window = Random(seed), 2, 3
    pool = BlockPool(rng.choice([5, 8, 13]), closes_chains=True)
    parents: dict[bytes, bytes] = {}
    known: set[bytes] = set()
    walkers: list[tuple[list[int], list[bytes], list[int]]] = []  # tokens, keys, the held tail of the table
    for _ in range(60):
        if rng.random() < 0.3 or not walkers:
            tokens = [rng.choice([1, 2]) for _ in range(2 * rng.randint(1, 9))]
            keys = block_keys(b"r" * 32, tokens, size)
            parents |= dict(zip(keys[1:], keys, strict=False))
            walkers.append((tokens, keys, []))
        walker = rng.choice(walkers)
        tokens, keys, held = walker
        taken = pool.allocate(1) if keys else None
        if taken is None:
            pool.release(held)
            walkers.remove(walker)
        else:
            key = keys.pop(0)
            held.append(pool.commit(taken[0], key, tokens[:size], 0, parents.get(key)))
            del tokens[:size]
            if len(held) > window:
                pool.release([held.pop(0)])
        if rng.random() < 0.05:
            pool.reset()
        for event in pool.take_events():
            if event.kind == "cleared":
                known.clear()
            known = known | set(event.keys) if event.kind == "stored" else known - set(event.keys)
        pool.check_integrity()
        assert known == set(pool.cached_keys())
        assert all(parents[key] in known for key in known if key in parents)
    for _, _, held in walkers:
        pool.release(held)
    assert pool.num_free == pool.num_blocks
