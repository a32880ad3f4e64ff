"""Blocks below the device: which tier is counted, and what that costs a worker in the choice."""

from router.tier_depths import NOTHING, Holdings, best_holdings, lower_blocks


def test_each_block_counts_in_the_fastest_tier_that_has_it() -> None:
    device = {"a": 4, "b": 0, "c": 3}
    depths = {"host": {"a": 2, "b": 3, "c": 5}, "disk": {"a": 8, "b": 3, "d": 1}}
    assert lower_blocks(device, depths) == {"a": {"disk": 4}, "b": {"host": 3}, "c": {"host": 2}, "d": {"disk": 1}}


def test_without_tiers_there_is_nothing() -> None:
    assert lower_blocks({"a": 4}, {}) == {}


def test_what_can_be_had_of_all_workers_of_a_kind() -> None:
    """The deepest device first, then what follows it in the fastest tier of anybody."""
    device = {"a": 4, "b": 1, "c": 9}
    lower = {"a": {"disk": 1}, "b": {"host": 6, "disk": 3}, "d": {"host": 2}}
    kinds = {"a": "x", "b": "x", "d": "x", "c": "y", "e": "z"}
    assert best_holdings(device, lower, kinds) == {
        "x": Holdings(4, {"host": 3, "disk": 3}),
        "y": Holdings(9, {}),
        "z": NOTHING,
    }
