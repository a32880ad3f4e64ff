"""The thread-safe face of the block pool: keys, statistics, snapshots, and two threads at once."""

import threading
from random import Random

import pytest

from engine.kv_cache import KvCache
from kvstore.block_pool import BlockPool
from kvstore.events import CacheEvent
from kvstore.hashing import block_keys

ROOT = b"r" * 32


def _cache(num_blocks: int = 4, **options: bool) -> KvCache:
    return KvCache(BlockPool(num_blocks, **options), ROOT, 2)


def _commit(cache: KvCache, tokens: list[int]) -> list[int]:
    keys = cache.keys_for(tokens)
    ids = cache.allocate(len(keys))
    assert ids is not None
    return [cache.commit(b, k, tokens[2 * i : 2 * i + 2]) for i, (b, k) in enumerate(zip(ids, keys, strict=True))]


def test_keys_are_those_of_the_chain() -> None:
    cache = _cache()
    keys = cache.keys_for([1, 2, 3, 4, 5], "salt")
    assert keys == block_keys(ROOT, [1, 2, 3, 4], 2, cache_salt="salt")
    assert cache.keys_for([3, 4, 5], parent=keys[0]) == keys[1:]
    assert cache.keys_for([1, 2], adapter=b"a") == block_keys(ROOT, [1, 2], 2, adapter=b"a")


def test_num_blocks_for() -> None:
    assert [_cache().num_blocks_for(n) for n in (0, 1, 2, 3, 4)] == [0, 1, 1, 2, 2]


def test_counts_and_match() -> None:
    cache = _cache()
    ids = _commit(cache, [1, 2, 3, 4])
    cache.release(ids)
    assert (cache.num_blocks, cache.num_free, cache.num_cached, cache.num_referenced) == (4, 4, 2, 0)
    assert cache.match(cache.keys_for([1, 2, 9, 9]), [1, 2, 9, 9]) == ids[:1]
    assert (cache.num_free, cache.num_referenced, cache.ref_count(ids[0])) == (3, 1, 1)
    cache.acquire(ids[:1])
    cache.release(ids[:1])
    cache.release(ids[:1])
    assert cache.allocate(5) is None
    assert cache.allocate(4) is not None
    stats = cache.stats()
    assert (stats.num_cached, stats.num_evictions, stats.num_referenced) == (0, 2, 4)
    assert cache.generation(ids[0]) == 2
    cache.check_integrity()


class _Evicting:
    """In a lock's place: whenever it is let go, another thread takes a block of the pool, and keeps it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._pool.allocate(1)


def test_a_prefix_stays_whole_while_it_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones go piece by piece, and transfers evict between two pieces: never the beginning before its end."""
    monkeypatch.setattr("engine.kv_cache._PIECE", 4)
    pool = BlockPool(40)
    cache = KvCache(pool, ROOT, 2)
    tokens = list(range(48))
    keys = cache.keys_for(tokens)
    cache.release(_commit(cache, tokens))
    cache.release(_commit(cache, list(range(100, 132))))  # used later
    cache._lock = _Evicting(pool)  # type: ignore[assignment]
    cache.renew(keys)
    there = [pool.is_cached(key) for key in keys]
    assert there == sorted(there, reverse=True)
    assert any(there)
    pool.check_integrity()


def test_a_snapshot_contains_what_its_events_would_say() -> None:
    cache = _cache()
    first = _commit(cache, [1, 2])
    assert cache.snapshot() == cache.keys_for([1, 2])
    assert cache.take_events() == []
    cache.release(first)
    assert cache.reset() == 1
    assert cache.take_events() == [CacheEvent("cleared")]


def test_an_eviction_is_told_at_once_and_nothing_else() -> None:
    cache, told = _cache(2), list[list[CacheEvent]]()
    cache.evicted = lambda: told.append(cache.take_events())  # whoever hears of it may look into the books
    cache.release(_commit(cache, [1, 2, 3, 4]))
    assert cache.allocate(3) is None
    cache.match(cache.keys_for([1, 2]), [1, 2])
    assert not told
    assert cache.allocate(1) is not None
    stored, removed = told[0]
    assert (stored.kind, removed) == ("stored", CacheEvent("removed", tuple(cache.keys_for([1, 2, 3, 4])[1:])))


def test_caching_can_be_off() -> None:
    assert (_cache().enable_caching, _cache(enable_caching=False).enable_caching) == (True, False)


def test_two_threads_keep_the_books_straight() -> None:
    cache = _cache(12)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = Random(seed)
        try:
            for _ in range(300):
                tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 3))]
                keys = cache.keys_for(tokens)
                table = cache.match(keys, tokens)
                fresh = cache.allocate(len(keys) - len(table)) or []
                for i, block_id in enumerate(fresh, start=len(table)):
                    table.append(cache.commit(block_id, keys[i], tokens[2 * i : 2 * i + 2]))
                cache.release(table)
                cache.take_events()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert cache.num_free == 12
    cache.check_integrity()
