"""What a step stores goes from a rank's pool of its heads into rank 0's pool of all, and blocks go the other way."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import ModelError
from engine.memory import KvLayout, KvMemory
from engine.parallel.heads import KvHeads
from engine.parallel.known_blocks import KnownBlocks
from engine.parallel.kv_rows import put_rows, take_rows
from engine.parallel.machines import Machines
from engine.parallel.messages import Loaded
from engine.parallel.shard import Shard
from kernels.kv_cells import KvFormat
from kernels.paged import PagedBatch
from kvstore.kv_groups import KvGroups, plan_groups

SIZE = 4
NUM_BLOCKS = 12


def fill(memory: KvMemory, seed: int) -> None:
    torch.manual_seed(seed)
    memory.buffer[:] = torch.randint(1, 100, memory.buffer.shape, dtype=torch.uint8).numpy()


@pytest.mark.parametrize("kv_format", [None, "int8", "fp8_e4m3"])
@pytest.mark.parametrize(("windows", "latent"), [([None, None], False), ([None, 8, None, 8], False), ([None], True)])
def test_only_the_tokens_rows_of_the_ranks_heads_change(
    kv_format: KvFormat | None, windows: list[int | None], latent: bool
) -> None:
    groups: KvGroups = plan_groups(windows, block_size=SIZE, max_chunk=8, one=False, latent=latent)
    heads = range(1) if latent else range(2, 4)
    num_heads = 1 if latent else 4
    layout = KvLayout(groups.layers_per_block, num_heads, 6, SIZE, torch.float32, kv_format, latent)
    whole, own = (
        KvMemory(each, NUM_BLOCKS, groups=groups) for each in (layout, replace(layout, num_kv_heads=len(heads)))
    )
    fill(whole, 1)
    fill(own, 2)
    batch = PagedBatch.build([3, 1], [6, 5], [[1, 2], [4, 5]], SIZE)
    others = [PagedBatch.build([3, 1], [6, 5], [[7, 8], [9, 10]], SIZE) for _ in range(len(groups) - 1)]
    batch = replace(batch, others=tuple(others))
    before = whole.buffer.copy()
    view = KvHeads(whole.blocks, layout, groups, heads)
    rows = take_rows(own, batch)
    put_rows(view, batch, rows)
    assert torch.equal(take_rows(view, batch), rows)
    changed = whole.buffer != before
    touched = {2, 5} | {1} | ({7, 8, 10} if others else set())
    assert set(np.flatnonzero(changed.any(axis=1)).tolist()) == touched
    assert 0 < changed.sum() <= len(rows)


def batch_of(*sequences: tuple[int, int, list[int]], firsts: tuple[int, ...] = ()) -> PagedBatch:
    """Of (new tokens, all tokens, blocks)."""
    queries, lengths, tables = zip(*sequences, strict=True)
    return PagedBatch.build(queries, lengths, tables, SIZE, firsts)


def test_what_came_otherwise_is_missing_once() -> None:
    known, generations = KnownBlocks(NUM_BLOCKS), np.ones(NUM_BLOCKS, np.uint64)

    def step(batch: PagedBatch) -> list[int]:
        missing = known.missing(batch, generations)
        known.note(batch, generations)
        return missing.tolist()

    assert step(batch_of((6, 6, [3, 1]))) == []  # a prompt: all its tokens are the step's own
    assert step(batch_of((1, 7, [3, 1]))) == []
    assert step(batch_of((2, 9, [5, 4, 2]))) == [4, 5]  # a prefix that was pulled
    assert step(batch_of((1, 10, [5, 4, 2]), (1, 8, [3, 1]))) == []
    generations[4] += 1  # another sequence's now
    assert step(batch_of((1, 11, [5, 4, 2]))) == [4]
    assert step(batch_of((1, 6, [5, 4]))) == []  # a draft that was given up: written anew
    generations[7] += 1  # a copy of a shared block, of two tokens
    assert step(batch_of((1, 7, [5, 7]))) == [7]


def test_what_a_window_has_left_behind_is_not_asked_for() -> None:
    known, generations = KnownBlocks(NUM_BLOCKS), np.ones(NUM_BLOCKS, np.uint64)
    sliding = batch_of((1, 11, [0, 6, 7]), firsts=(1,))
    batch = replace(batch_of((1, 11, [1, 2, 3])), others=(sliding,))
    assert known.missing(batch, generations).tolist() == [1, 2, 3, 6, 7]
    known.note(batch, generations)
    assert known.missing(batch, generations).tolist() == []


def test_who_tells_of_its_rows_and_what_a_pool_may_take() -> None:
    shard = Shard(0, 4, num_kv_heads=2, head_dim=4, vocab_size=10)
    machines = Machines({1: "", 2: "b", 3: "b"})
    assert (machines.num_here, [machines.num_sharing(rank) for rank in (1, 2, 3)]) == (2, [2, 2, 2])
    assert machines.heads_elsewhere(shard) == {2: range(1, 2), 3: range(1, 2)}
    assert machines.tellers(shard) == {2: range(1, 2)}  # the other one has the same head
    assert machines.tellers(replace(shard, num_kv_heads=1)) == {}  # all have the one that rank 0 stores
    layout = KvLayout(1, 2, 4, SIZE, torch.float32)
    loaded = {rank: Loaded(b"", "x", free) for rank, free in {1: 1, 2: 1000, 3: 900}.items()}
    assert machines.pool_bytes(5000, layout, loaded) == 900  # half a block there, for each of two
    assert machines.pool_bytes(500, layout, loaded) == 500
    with pytest.raises(ModelError, match="rank 1 would compute as x, rank 0 as y"):
        machines.check_classes(loaded, "y")
    with pytest.raises(ModelError, match=r"rank 2 has read other weights .*: the files of b are others"):
        machines.check_weights({2: loaded[2]}, b"x", "model")
