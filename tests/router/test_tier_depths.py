"""Blocks below the device: which tier is counted, and what that costs a worker in the choice."""

from router.tier_depths import lower_blocks


def test_each_block_counts_in_the_fastest_tier_that_has_it() -> None:
    device = {"a": 4, "b": 0, "c": 3}
    depths = {"host": {"a": 2, "b": 3, "c": 5}, "disk": {"a": 8, "b": 3, "d": 1}}
    assert lower_blocks(device, depths) == {"a": {"disk": 4}, "b": {"host": 3}, "c": {"host": 2}, "d": {"disk": 1}}


def test_without_tiers_there_is_nothing() -> None:
    assert lower_blocks({"a": 4}, {}) == {}
