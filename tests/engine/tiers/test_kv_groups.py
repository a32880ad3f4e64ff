"""Tiers under several KV groups: what a hit needs comes back, from whichever tier, and never a wrong token.

The fake runner compares what lies in every block that a step may look at (`FakeRunner._check_window`).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from engine.tiers.disk_slots import DiskSlots
from engine.tiers.host_slots import HostSlots
from engine.tiers.store_format import StoreFormat
from engine.tiers.store_tier import StoreSettings
from kvstore.block_store import BlockName, Heads, Stored
from kvstore.kv_groups import KvGroup, KvGroups
from kvstore.tier_block import Owned
from kvstore.tier_book import TierBook
from kvstore.tier_chain import Place
from tests.engine.harness import Harness, prompt_of

MODELS = {
    "one and one": (None, 9),
    "one and two": (None, 9, 9),
    "three and two": (None, None, None, 9, 9),
    "two windows": (None, 5, 13),
}
PROMPT = prompt_of(38, salt=3)  # nine full blocks and a rest


@pytest.fixture
def build() -> Iterator[Callable[..., Harness]]:
    built: list[Harness] = []

    def make(model: str = "three and two", **options: Any) -> Harness:
        fields: dict[str, Any] = {
            "num_blocks": 96,
            "max_model_len": 64,
            "num_host_blocks": 200,
            "group_windows": MODELS[model],
        }
        built.append(Harness(**fields | options))
        return built[-1]

    yield make
    for harness in built:
        harness.check_outputs()
        harness.check_idle()


def run(harness: Harness, name: str, prompt: list[int], **params: Any) -> tuple[int, dict[str, int]]:
    """Tokens that were cached, and of them those that tiers had, by tier; afterwards all is written."""
    harness.ask(name, prompt, **{"max_tokens": 3} | params)
    harness.run()
    assert harness.tiers is not None
    assert harness.tiers.quiesce()
    return harness.cached[name], dict(harness.loaded[name])


def book_of(harness: Harness, tier: int = 0) -> TierBook:
    assert harness.tiers is not None
    return harness.tiers.tiers[tier]._book


def names_of(harness: Harness, group: int, prompt: list[int] = PROMPT) -> list[bytes]:
    assert harness.tiers is not None
    return [harness.tiers.chain.name(key, group) for key in harness.cache.keys_for(prompt)]


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_comes_back(build: Callable[..., Harness], model: str) -> None:
    """Of the full groups all of it, of the others the window."""
    harness = build(model)
    run(harness, "cold", PROMPT)
    harness.cache.reset()
    num_free = harness.cache.num_free
    assert run(harness, "again", PROMPT) == (36, {"host": 36})
    assert harness.cache.num_free == num_free, "nothing is held"
    harness.cache.reset()
    load = _load(harness)
    assert sorted(place for place, _ in load.loaded) == sorted(load.chain.of_hit(9))
    load.give_back()
    assert book_of(harness).num_ready >= 9 * len(harness.cache.groups), "every block is written back"


def _load(harness: Harness, **options: Any) -> Any:
    assert harness.tiers is not None
    keys = harness.cache.keys_for(PROMPT)
    load = harness.tiers.start_load(keys, PROMPT, [0] * harness.tiers.chain.num_full, **options)
    assert load is not None
    load.done.result(30)
    return load


@pytest.mark.parametrize("model", MODELS)
def test_the_device_has_the_head_and_the_tier_the_rest(build: Callable[..., Harness], model: str) -> None:
    harness = build(model)
    run(harness, "cold", PROMPT)
    harness.cache.reset()
    run(harness, "head", PROMPT[:17], max_tokens=1)
    assert run(harness, "again", PROMPT) == (36, {"host": 20})


@pytest.mark.parametrize("model", MODELS)
def test_the_device_has_lost_only_a_window(build: Callable[..., Harness], model: str) -> None:
    """What is loaded is the window alone."""
    harness = build(model)
    run(harness, "cold", PROMPT)
    chain = harness.tiers.chain if harness.tiers is not None else None
    assert chain is not None
    pool, keys = harness.cache._pool, harness.cache.keys_for(PROMPT)
    pool._forget_all([block_id for key in keys for g in chain.sliding if (block_id := pool.find(key, g)) is not None])
    load = _load(harness)
    assert [place for place, _ in load.loaded] == chain.windows(9)
    assert sorted(load.held) == chain.prefix(0, 9)
    load.give_back()
    assert run(harness, "again", PROMPT) == (36, {})


@pytest.mark.parametrize("model", ["three and two", "two windows"])
@pytest.mark.parametrize("number", [0, 4, 7, 8])
def test_a_window_block_that_is_gone_makes_the_hit_shorter(
    build: Callable[..., Harness], model: str, number: int
) -> None:
    """A hit must end before it, or so far behind it that it isn't seen any more."""
    harness = build(model)
    run(harness, "cold", PROMPT)
    harness.cache.reset()
    groups = harness.cache.groups
    group = groups.num_full
    book_of(harness).forget(names_of(harness, group)[number])
    ends = [end for end in range(10) if not groups.first_block(group, 4 * end) <= number < end]
    expected = 4 * max(end for end in ends if end <= 9)
    assert run(harness, "again", PROMPT) == (expected, {"host": expected} if expected else {})


@pytest.mark.parametrize("model", ["three and two", "two windows"])
@pytest.mark.parametrize("group", [0, 1, -1])
def test_a_damaged_block_is_never_used(build: Callable[..., Harness], model: str, group: int) -> None:
    """CASES F4: in any group; the tokens are right (`check_outputs`), and it isn't offered again."""
    harness = build(model)
    run(harness, "cold", PROMPT)
    harness.cache.reset()
    assert harness.tiers is not None
    group %= len(harness.cache.groups)
    name = names_of(harness, group)[8]
    entry = book_of(harness)._entries[name]
    slots = harness.tiers.tiers[0].slots
    assert isinstance(slots, HostSlots)
    slots.buffer[entry.slot, 5] ^= 1
    cached, _ = run(harness, "again", PROMPT)
    assert cached < 36
    assert harness.tiers.num_corrupt["host"] == 1
    book_of(harness).check_integrity()


def test_a_disk_brings_all_groups_back_after_a_restart(build: Callable[..., Harness], tmp_path: Path) -> None:
    def disk(block_size: int, block_bytes: int) -> DiskSlots:
        return DiskSlots(tmp_path, 1 << 20, b"f" * 32, block_size, block_bytes)

    first = build(num_host_blocks=0, disk=disk)
    run(first, "cold", PROMPT)
    assert first.tiers is not None
    first.tiers.close()
    second = build(num_host_blocks=0, disk=disk)
    assert book_of(second).num_ready == book_of(first).num_ready
    assert run(second, "again", PROMPT) == (36, {"disk": 36})
    other = build(num_host_blocks=200, disk=lambda *sizes: DiskSlots(tmp_path / "b", 1 << 20, b"f" * 32, *sizes))
    run(other, "cold", PROMPT)
    assert other.tiers is not None
    other.tiers.tiers[0].clear()
    other.cache.reset()
    assert run(other, "from disk", PROMPT) == (36, {"disk": 36})


def test_a_window_in_a_slower_tier_completes_the_hit(build: Callable[..., Harness], tmp_path: Path) -> None:
    harness = build(disk=lambda *sizes: DiskSlots(tmp_path, 1 << 20, b"f" * 32, *sizes))
    run(harness, "cold", PROMPT)
    harness.cache.reset()
    book_of(harness).forget(names_of(harness, 3)[8])
    load = _load(harness)
    assert [place for (place, _), name in zip(load.loaded, load._names(), strict=True) if name == "disk"] == [
        Place(8, 3)
    ]
    load.give_back()
    assert run(harness, "again", PROMPT)[0] == 36


def test_blocks_that_come_out_of_order_are_written_all_the_same(build: Callable[..., Harness]) -> None:
    """A transfer brings one group after the other: what hangs on another waits for it."""
    harness = build()
    cache, keys = harness.cache, harness.cache.keys_for(PROMPT)
    held = []
    for group in reversed(range(len(cache.groups))):
        for number, key in enumerate(keys):
            (block_id,) = cache.allocate(1) or ()
            harness.runner.slots[block_id] = np.asarray(PROMPT[4 * number : 4 * number + 4]) + 1000 * group
            held.append((block_id, number, key, group))
    for block_id, number, key, group in sorted(held, key=lambda each: each[3]):
        tokens, parent = PROMPT[4 * number : 4 * number + 4], keys[number - 1] if number else None
        cache.commit(block_id, key, tokens, parent, group=group, is_received=True)
    assert harness.tiers is not None
    assert harness.tiers.quiesce()
    assert book_of(harness).num_ready == 9 * len(cache.groups)
    cache.release([block_id for block_id, *_ in held])
    cache.reset()
    assert run(harness, "again", PROMPT) == (36, {"host": 36})


def test_tenants_and_prompts_are_cleared_in_every_group(build: Callable[..., Harness]) -> None:
    harness = build()
    run(harness, "cold", PROMPT)
    run(harness, "mine", PROMPT, cache_salt="s")
    assert harness.tiers is not None
    before = book_of(harness).num_ready
    assert harness.tiers.forget(harness.cache.keys_for(PROMPT)[4]) > 5 * len(harness.cache.groups)
    assert harness.tiers.tiers[0].depth(harness.cache.keys_for(PROMPT)) == 4
    harness.tiers.clear(Owned.by_tenant("s"))
    assert book_of(harness).num_ready == 4 * len(harness.cache.groups) < before
    harness.tiers.clear()
    assert book_of(harness).num_ready == 0


class _MemoryStore:
    """A block store in this process."""

    max_batch = 64

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    async def touch(self, names: Sequence[BlockName]) -> list[bool]:
        return [name.key in self.values for name in names]

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    async def put(self, values: Sequence[tuple[BlockName, bytes]]) -> Stored:
        self.values |= {name.key: value for name, value in values}
        return Stored(len(self.values), 0)

    async def heads(self, cursor: int, num_bytes: int) -> Heads:
        return Heads([(key, value[:num_bytes]) for key, value in self.values.items()], 0)

    async def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.values.pop(key, None)

    async def close(self) -> None: ...


def test_what_the_device_has_stays_while_the_store_brings_the_rest(build: Callable[..., Harness]) -> None:
    """The windows are gone and the end of group 0; what else there is is evicted meanwhile, if it can be."""
    harness = build(num_host_blocks=0, store=lambda *sizes: (_MemoryStore(), StoreFormat(b"m" * 32, *sizes)))
    run(harness, "cold", PROMPT)
    assert harness.tiers is not None
    assert harness.tiers.store is not None
    harness.tiers.store.settings = StoreSettings(min_deadline=60)
    cache, pool, keys = harness.cache, harness.cache._pool, harness.cache.keys_for(PROMPT)
    lost = [(key, group) for key in keys for group in (3, 4)] + [(key, 0) for key in keys[5:]]
    pool._forget_all([block_id for key, group in lost if (block_id := pool.find(key, group)) is not None])
    load = _load(harness, ask_store=True)
    others = cache.allocate(cache.num_free)
    landed = load.commit("")
    assert all(cache.is_cached(key, group) for key in keys for group in range(3))
    assert cache.hit_depth(keys) == 9
    cache.release(landed)
    cache.release(others or ())


def _with_store(build: Callable[..., Harness], model: str, **options: Any) -> Harness:
    """A harness whose store has the prompt, and whose device has nothing."""
    harness = build(model, store=lambda *sizes: (_MemoryStore(), StoreFormat(b"m" * 32, *sizes)), **options)
    run(harness, "cold", PROMPT)
    assert harness.tiers is not None
    assert harness.tiers.store is not None
    harness.tiers.store.settings = StoreSettings(min_deadline=60)
    harness.cache.reset()
    return harness


@pytest.mark.parametrize(("model", "most"), [("three and two", 22), ("one and one", 8), ("one and one", 2)])
def test_the_store_is_asked_for_no_more_than_there_is_room_for(
    build: Callable[..., Harness], model: str, most: int
) -> None:
    """With windows and all; of each number all full groups or none."""
    harness = _with_store(build, model, num_host_blocks=0)
    assert harness.tiers is not None
    keys, chain = harness.cache.keys_for(PROMPT), harness.tiers.chain
    load = harness.tiers.start_load(keys, PROMPT, [0] * chain.num_full, max_blocks=most, ask_store=True)
    depth = (most - chain.num_windows(9)) // chain.num_full
    if depth < 1:
        assert load is None
        return
    assert load is not None
    load.done.result(30)
    assert chain.num_full * depth < len(load.block_ids) <= most
    landed = load.commit("")
    assert harness.cache.hit_depth(keys) == depth
    harness.cache.release(landed)


def test_what_a_tier_loses_before_it_is_held_is_not_held_twice_by_the_store(
    build: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan and the taking another thread evicts the fifth block of the tier."""
    harness = _with_store(build, "three and two")
    run(harness, "head", PROMPT[:9], max_tokens=1)  # two blocks on the device
    assert harness.tiers is not None
    (tier,) = harness.tiers.tiers
    take, num_taken = tier.take, 0

    def lose(*arguments: Any) -> Any:
        nonlocal num_taken
        num_taken += 1
        return None if num_taken == 5 else take(*arguments)

    monkeypatch.setattr(tier, "take", lose)
    load = _load(harness, ask_store=True)
    places = [place for place, _ in load.loaded]
    assert len(places) == len(set(places))
    harness.cache.release(load.commit(""))
    assert not harness.cache.num_referenced
    assert harness.cache.hit_depth(harness.cache.keys_for(PROMPT)) == 9


def test_group_0_never_has_more_than_its_siblings(build: Callable[..., Harness]) -> None:
    """Room for four blocks, of one number all three and of the next one."""
    harness = build()
    run(harness, "cold", PROMPT)
    harness.cache.reset()
    assert harness.tiers is not None
    keys = harness.cache.keys_for(PROMPT)
    load = harness.tiers.start_load(keys, PROMPT, [0] * 5, as_runs=True, max_blocks=4)
    assert load is not None
    load.done.result(30)
    assert [place for place, _ in load.loaded] == [Place(0, 0), Place(0, 1), Place(0, 2), Place(1, 0)]
    landed = load.commit("")
    assert [harness.cache.is_cached(key) for key in keys[:2]] == [True, False]
    harness.cache.release(landed)


@pytest.mark.parametrize("seed", range(4))
def test_any_history_gives_the_right_tokens(build: Callable[..., Harness], seed: int, tmp_path: Path) -> None:
    """Prompts that share prefixes, a pool and tiers too small for them, and blocks lost and damaged meanwhile."""
    random = Random(seed)
    model = list(MODELS)[seed]
    windows = tuple(KvGroup((), window) for window in MODELS[model])
    harness = build(
        model,
        num_blocks=KvGroups(windows, 4, 16).num_pool_blocks(48) + random.randint(0, 4),
        max_model_len=48,
        num_host_blocks=random.randint(20, 60),
        disk=(lambda *sizes: DiskSlots(tmp_path, 40_000, b"f" * 32, *sizes)) if seed % 2 else None,
    )
    assert harness.tiers is not None
    prompts = [prompt_of(random.randint(5, 32), salt=number % 3) for number in range(9)]
    for number in range(24):
        for at in range(random.randint(1, 4)):
            harness.ask(f"{number}.{at}", random.choice(prompts), max_tokens=random.randint(1, 16))
        harness.run()
        if random.random() < 0.5:
            assert harness.tiers.quiesce()
        for _ in range(random.randint(0, 2)):
            damage(harness, random)
        if random.random() < 0.6:
            harness.cache.reset()
        for tier in harness.tiers.tiers:
            tier.check_integrity()
    harness.tiers.clear()
    for name in ("last", "last again"):
        harness.cache.reset()
        cached, _ = run(harness, name, prompt_of(9, salt=9))
    assert cached == 8, "after all that they still work"


def damage(harness: Harness, random: Random) -> None:
    """Forgets a block in some tier, or changes a bit of it in host memory."""
    assert harness.tiers is not None
    tier = random.choice(harness.tiers.tiers)
    entries = list(tier._book._entries.values())
    if not entries:
        return
    entry = random.choice(entries)
    if isinstance(tier.slots, HostSlots) and random.random() < 0.5:
        tier.slots.buffer[entry.slot, random.randrange(32)] ^= 1
    else:
        tier.forget(entry.block.key)
