"""What block tables promise beyond the scheduler's tests: copy sources stay, hopeless look-ups are not repeated."""

import pytest

from engine.block_tables import BlockTables
from engine.kv_cache import KvCache
from engine.request import EngineRequest
from engine.sequence import Sequence
from kvstore.block_pool import BlockPool
from pagewire.sampling import SamplingParams
from tests.engine.fake_runner import GROUP_OFFSET
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
    pool.release = lambda ids, *rest: (lengths.append(len(ids)), release(ids, *rest))[1]  # type: ignore[method-assign]
    assert cache.match(keys, tokens) == table
    assert cache.release(table) == 0
    assert cache.release(table) == 1000
    assert max(lengths) <= 256
    assert cache.allocate(1) == [999], "tails are evicted first"
    cache.check_integrity()


@pytest.mark.parametrize("how", ["received", "computed"])
def test_a_window_that_others_bring_back_is_noticed(how: str) -> None:
    """Group 0 had all of it before, so there is no next block to wait for."""
    harness = Harness(num_blocks=14, max_model_len=28, windows=(None, 5))
    prompt, cache = prompt_of(24), harness.cache
    keys, blocks, spare = cache.keys_for(prompt), cache.allocate(7) or [], cache.allocate(1) or []

    def commit(block: int, i: int, group: int) -> int:
        tokens = prompt[4 * i : 4 * i + 4]
        harness.runner.slots[block] = [token + group * GROUP_OFFSET for token in tokens]
        return cache.commit(block, keys[i], tokens, keys[i - 1] if i else None, group=group, is_received=how[0] == "r")

    held = [commit(blocks[i], i, 0) for i in range(6)]
    harness.ask("waits", [*prompt, 3], max_tokens=1)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.load().num_waiting == 1
    if how == "computed":  # then in every group
        held.append(commit(spare.pop(), 5, 0))
    held.append(commit(blocks[6], 5, 1))
    harness.step()
    assert harness.cached["waits"] == 24
    cache.release([*held, *spare])
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_request_that_comes_gives_nothing_back() -> None:
    """It would look like blocks that became free to those that wait before it."""
    harness = Harness(max_num_seqs=1)
    shared = prompt_of(12)
    harness.ask("first", shared, max_tokens=1)
    harness.run()
    harness.ask("runs", 8, max_tokens=8, ignore_eos=True)
    harness.step()
    num_releases = harness.cache.num_releases
    harness.ask("comes", [*shared, 5], max_tokens=1)
    assert harness.cache.num_releases == num_releases
    harness.run()
    assert harness.cached["comes"] == 12
    harness.check_outputs()
    harness.check_idle()
