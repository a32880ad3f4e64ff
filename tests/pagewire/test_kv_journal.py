"""The journal of a prefix cache: what followers see equals what the cache holds, however they joined."""

import random

import pytest

from engine.kv_cache import KvCache
from kvstore.block_pool import BlockPool
from kvstore.events import CacheEvent
from pagewire.kv_journal import Batch, Block, Cleared, JournalGap, KvJournal, Removed, Stored

A, B = (Block(name * 32, None, (1, 2)) for name in (b"a", b"b"))


def stored(*blocks: Block) -> CacheEvent:
    return CacheEvent("stored", tuple(block.key for block in blocks))


def removed(*blocks: Block) -> CacheEvent:
    return CacheEvent("removed", tuple(block.key for block in blocks))


def apply(held: dict[bytes, Block], batches: list[Batch]) -> None:
    for batch in batches:
        for change in batch.changes:
            if isinstance(change, Stored):
                for block in change.blocks:
                    assert block.key not in held, "stored twice"
                    held[block.key] = block
            elif isinstance(change, Removed):
                for key in change.keys:
                    del held[key]
            else:
                held.clear()


def test_batches_are_numbered_and_continue_anywhere() -> None:
    journal = KvJournal(first_seq=100)
    journal.note(A)
    journal.append([stored(A)])
    journal.append([])
    journal.note(B)
    journal.append([stored(B), removed(A)])
    assert journal.since(100) == [Batch(101, (Stored((A,)),)), Batch(102, (Stored((B,)), Removed((A.key,))))]
    assert [batch.seq for batch in journal.since(101)] == [102]
    assert journal.since(102) == []
    assert journal.snapshot() == (102, [B])
    for foreign in (99, 103):
        with pytest.raises(JournalGap, match="100 … 102"):
            journal.since(foreign)


def test_a_block_that_goes_and_comes_back_within_one_batch() -> None:
    journal = KvJournal()
    journal.note(A)
    journal.note(A)
    journal.append([stored(A), removed(A), stored(A)])
    journal.note(A)  # committed again although it is known
    journal.append([removed(A), stored(A)])
    assert journal.snapshot() == (3, [A])
    journal.append([CacheEvent("cleared")])
    assert journal.snapshot() == (4, [])
    assert journal.since(3) == [Batch(4, (Cleared(),))]


def test_history_is_bounded_by_its_keys() -> None:
    journal = KvJournal(max_keys=10)
    for number in range(20):
        block = Block(bytes([number]) * 32, None, (number,))
        journal.note(block)
        journal.append([stored(block)])
    assert [batch.seq for batch in journal.since(journal.seq - 5)] == [17, 18, 19, 20, 21]
    with pytest.raises(JournalGap):
        journal.since(journal.seq - 6)
    assert len(journal.snapshot()[1]) == 20


@pytest.mark.parametrize("seed", range(5))
def test_followers_of_a_real_cache(seed: int) -> None:
    """Random commits, evictions and resets; one follower from the start, one that joins from a snapshot each time."""
    rng = random.Random(seed)
    cache = KvCache(BlockPool(6), b"r" * 32, 2)
    held: dict[bytes, Block] = {}
    seq, _ = cache.journal_snapshot()
    for _ in range(200):
        prompt = [rng.randrange(3) for _ in range(2 * rng.randrange(1, 5))]
        keys = cache.keys_for(prompt, "salt")
        table = cache.match(keys, prompt)
        for i in range(len(table), len(keys)):
            if (fresh := cache.allocate(1)) is None:
                break
            parent = keys[i - 1] if i else None
            table.append(cache.commit(fresh[0], keys[i], prompt[2 * i : 2 * i + 2], parent, "salt"))
        cache.release(table)
        if rng.random() < 0.05:
            cache.reset()
        if rng.random() < 0.5:
            cache.take_events()
            apply(held, batches := cache.journal_since(seq))
            seq = batches[-1].seq if batches else seq
            last, blocks = cache.journal_snapshot()
            assert last == seq
            assert {block.key: block for block in blocks} == held
            assert held.keys() == set(cache.cached_keys())
            seen: set[bytes | None] = {None}
            for block in blocks:
                assert block.parent in seen, "a child before its parent"
                assert (len(block.token_ids), block.cache_salt) == (2, "salt")
                seen.add(block.key)
