"""What block tables promise beyond the scheduler's tests: copy sources stay, hopeless look-ups are not repeated."""

from engine.block_tables import BlockTables
from engine.kv_cache import KvCache
from engine.request import EngineRequest
from engine.sequence import Sequence
from kvstore.block_pool import BlockPool
from pagewire.sampling import SamplingParams
from tests.engine.harness import Harness, prompt_of


def _cache(num_blocks: int) -> KvCache:
    return KvCache(BlockPool(num_blocks), b"r" * 32, 4)


def _sequence(choice: int, tokens: list[int]) -> Sequence:
    return Sequence(EngineRequest("r", tuple(tokens), SamplingParams()), 1, choice, list(tokens))


def test_the_source_of_a_pending_copy_cannot_be_taken() -> None:
    """A waiting sibling is preempted in the plan in which another one copies: a transfer could take the block."""
    cache = _cache(3)
    tables = BlockTables(cache)
    trunk = _sequence(0, [5, 6])
    assert tables.grow(trunk, 2, [])
    tables.commit(trunk, 2)
    runs, waits = _sequence(0, [5, 6, 7]), _sequence(1, [5, 6, 8])
    for branch in (runs, waits):
        tables.fork(trunk, branch)
    tables.free(trunk)
    copies: list[tuple[int, int]] = []
    assert tables.grow(runs, 3, copies)
    ((source, destination),) = copies
    assert not tables.num_missing(waits, 3), "the last owner writes in place"
    tables.free(waits)
    assert cache.ref_count(source) == 1
    assert source not in (cache.allocate(1) or [])
    tables.forget_copies()
    assert cache.ref_count(source) == 0
    assert runs.block_table == [destination]
    tables.free(runs)
    cache.check_integrity()


def _count_matches(harness: Harness) -> list[int]:
    matched: list[int] = []
    match = harness.cache.match

    def counted(*arguments: object) -> list[int]:
        matched.append(1)
        return match(*arguments)  # type: ignore[arg-type]

    harness.cache.match = counted  # type: ignore[method-assign]
    return matched


def test_a_held_up_head_is_not_looked_up_in_every_step() -> None:
    harness = Harness(num_blocks=14, max_num_seqs=3)
    shared = prompt_of(12)
    harness.ask("first", shared, max_tokens=1)
    harness.run()
    harness.ask("long", 20, max_tokens=20, ignore_eos=True, priority=-1)
    harness.step()
    harness.step()
    matched = _count_matches(harness)
    harness.ask("waits", [*shared, *prompt_of(24, salt=5)], max_tokens=2, ignore_eos=True)
    for _ in range(10):
        harness.step()
    assert not harness.tokens["waits", 0]
    assert len(matched) <= 2
    harness.run()
    harness.check_outputs()
    assert harness.cached["waits"] > 0 or harness.cache.stats().num_evictions
    harness.check_idle()


def test_what_others_store_or_give_back_is_noticed() -> None:
    """The held-up head goes on as soon as its next block is cached, or one becomes free."""
    harness = Harness(num_blocks=12, max_num_seqs=4, max_model_len=40)
    prompt = prompt_of(24)
    blocks = harness.cache.allocate(8)
    assert blocks is not None
    harness.ask("waits", [*prompt, 3], max_tokens=1)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.load().num_running == 0
    keys = harness.cache.keys_for(prompt)
    for i, key in enumerate(keys):  # a transfer brings the whole prompt
        harness.runner.slots[blocks[i]] = prompt[4 * i : 4 * i + 4]
        blocks[i] = harness.cache.commit(blocks[i], key, prompt[4 * i : 4 * i + 4])
    harness.step()
    assert harness.cached["waits"] == 24
    harness.run()
    harness.ask("again", 36, max_tokens=1)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.load().num_waiting == 1
    harness.cache.release(blocks)
    harness.step()
    assert harness.scheduler.load().num_waiting == 0
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_long_match_holds_the_lock_for_pieces_of_it() -> None:
    cache = _cache(1000)
    tokens = list(range(4000))
    keys = cache.keys_for(tokens)
    table = cache.allocate(1000)
    assert table is not None
    for i, key in enumerate(keys):
        cache.commit(table[i], key, tokens[4 * i : 4 * i + 4])
    pool, lengths = cache._pool, []
    match, release = pool.match, pool.release
    pool.match = lambda keys, *rest: (lengths.append(len(keys)), match(keys, *rest))[1]  # type: ignore[method-assign]
    pool.release = lambda ids: (lengths.append(len(ids)), release(ids))[1]  # type: ignore[method-assign]
    assert cache.match(keys, tokens) == table
    assert cache.release(table) == 0
    assert cache.release(table) == 1000
    assert max(lengths) <= 256
    assert cache.allocate(1) == [999], "tails are evicted first"
    cache.check_integrity()
