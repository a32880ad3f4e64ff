"""Load or compute: by what both have cost, whichever tiers the blocks lie in."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.rates import Prior, Rate
from engine.tiers.disk_slots import DiskSlots
from engine.tiers.eviction import HALF_CONTEXT, MAX_USES, SlowerTier, cost_of
from engine.tiers.load_costs import LoadCosts, best_load
from kvstore.tier_block import Entry, TierBlock
from tests.engine.harness import Harness, prompt_of

PROMPT = prompt_of(22, salt=3)  # five full blocks and a rest
DEAR, CHEAP = 1e-3, 1e12  # prefill rates, tokens/s


def _costs(bytes_per_second: float, latency: float = 0.0) -> LoadCosts:
    """Blocks of 10 tokens and 1000 bytes; computing one takes a second."""
    return LoadCosts(10, 1000, Prior(latency, bytes_per_second), Rate(10, 1e9))


def _num_worth_loading(runs: list[tuple[LoadCosts, int]], now: float) -> int:
    """Of one KV group's blocks, which lie in one tier after the other: the best of the cuts between them."""
    cuts = [runs[: i + 1] for i in range(len(runs))]
    depths = [sum(num for _, num in cut) for cut in cuts]
    best = best_load(list(zip(depths, cuts, strict=True)), now)
    return 0 if best is None else depths[best]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(_costs(2000), 3)], 3),
        ([(_costs(500), 3)], 0),
        ([(_costs(2000, latency=2.0), 3)], 0),
        ([(_costs(2000, latency=2.0), 5)], 5),
        ([(_costs(2000), 3), (_costs(500), 4)], 3),
        ([(_costs(900), 2), (_costs(10_000), 4)], 6),
        ([(_costs(100), 2), (_costs(10_000), 4)], 0),
        ([(_costs(2000), 0), (_costs(2000), 2)], 2),
        ([(_costs(2000, latency=5.0), 0), (_costs(2000), 2)], 2),
        ([], 0),
    ],
)
def test_the_cheapest_cut_between_loading_and_computing(runs: list[tuple[LoadCosts, int]], expected: int) -> None:
    """A slow tier in front of a fast one is worth it as long as both together are."""
    assert _num_worth_loading(runs, 0.0) == expected


def test_a_measurement_teaches_and_is_forgotten() -> None:
    costs = _costs(2000)
    costs.observe(4, 1.0, 30.0, 100.0, num_first=1)
    assert _num_worth_loading([(costs, 4)], 101.0) == 0
    assert _num_worth_loading([(costs, 4)], 131.0) == 4, "else a tier that was slow once is never asked again"


def test_a_block_is_worth_what_it_takes_to_have_it_again() -> None:
    entry = Entry(TierBlock(b"a", None, ()), 0, num_uses=3)
    fast, slow = SlowerTier(_costs(10_000), b"a".__eq__), SlowerTier(_costs(2), b"a".__eq__)
    elsewhere = replace(fast, holds=b"b".__eq__)
    assert cost_of(entry, 10) == cost_of(entry, 10, [elsewhere]) == cost_of(entry, 10, [slow]) == 3.0
    assert cost_of(entry, 10, [slow, fast]) == pytest.approx(0.3)
    entry.depth = HALF_CONTEXT // 10
    assert cost_of(entry, 10) == 6.0
    entry.num_uses = 1000
    assert cost_of(entry, 10) == 2 * MAX_USES


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_dearer_than_computing_is_not_loaded(tier: str, tmp_path: Path) -> None:
    def disk(block_size: int, block_bytes: int) -> DiskSlots:
        return DiskSlots(tmp_path, 64 * (1024 + block_bytes), b"f" * 32, block_size, block_bytes)

    case = Harness(num_blocks=16, num_host_blocks=32) if tier == "host" else Harness(num_blocks=16, disk=disk)
    assert case.tiers is not None
    (costs,) = case.tiers.costs.values()
    loaded, declined = [], []
    for number, rate in enumerate((CHEAP, DEAR, CHEAP)):
        costs.prefill = Rate(rate, 1e9)
        case.ask(f"{number}", PROMPT, max_tokens=3)
        case.run()
        assert case.tiers.quiesce()
        loaded.append(case.loaded[f"{number}"].get(tier, 0))
        declined.append(case.tiers.counts()[tier][1]["declined"])
        case.cache.reset()
    assert (loaded, declined) == ([0, 20, 0], [0, 0, 5])
    case.check_outputs()
    case.check_idle()


def test_a_preempted_sequence_computes_what_is_dearer_to_load() -> None:
    """Its blocks are below the device either way; what was saved is used only where that beats computing."""
    nums = []
    for rate in (DEAR, CHEAP):
        case = Harness(num_blocks=16, num_host_blocks=64, max_num_batched_tokens=32)
        assert case.tiers is not None
        case.tiers.costs["host"].prefill = Rate(rate, 1e9)
        case.ask("first", 20, max_tokens=16)
        case.ask("second", 20, max_tokens=16)
        while not case.scheduler.num_preemptions:
            case.step()
        assert case.tiers.quiesce()
        case.cache.reset()
        case.run()
        events = case.tiers.counts()["host"][1]
        nums.append((case.scheduler.num_preemptions > 0, events["declined"] > 0))
        case.check_outputs()
        case.check_idle()
    assert nums == [(True, False), (True, True)]


def test_loading_is_measured() -> None:
    case = Harness(num_blocks=16, num_host_blocks=32)
    assert case.tiers is not None
    costs, seen = case.tiers.costs["host"], []
    observe = costs.observe

    def watch(num_blocks: int, first: float, rest: float, now: float, *, num_first: int = 0) -> None:
        seen.append((num_blocks, num_first))
        assert 0 < first < 60
        assert 0 <= rest < 60
        observe(num_blocks, first, rest, now, num_first=num_first)

    costs.observe = watch  # type: ignore[method-assign]
    for name in ("cold", "warm"):
        case.ask(name, PROMPT, max_tokens=1)
        case.run()
        assert case.tiers.quiesce()
        case.cache.reset()
    assert seen == [(5, 1)]
    case.check_idle()
