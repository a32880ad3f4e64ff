"""Water-filling: exact shares, and max-min fairness on random demands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.token_budget import share_fairly, water_fill


@pytest.mark.parametrize(
    ("budget", "demands", "shares"),
    [
        (8, [], []),
        (8, [5], [5]),
        (8, [20], [8]),
        (8, [2, 9, 9], [2, 3, 3]),
        (8, [9, 2, 9], [3, 2, 3]),
        (8, [9, 9, 9], [3, 3, 2]),
        (8, [100, 1], [7, 1]),
        (2, [9, 9, 9], [1, 1, 0]),
        (0, [3, 1], [0, 0]),
        (100, [3, 1, 7], [3, 1, 7]),
    ],
)
def test_a_budget_serves_small_demands_first(budget: int, demands: list[int], shares: list[int]) -> None:
    assert water_fill(budget, demands) == shares


@given(st.integers(0, 60), st.lists(st.integers(1, 30), max_size=9))
def test_nobody_could_get_more_without_taking_from_one_who_has_less(budget: int, demands: list[int]) -> None:
    shares = water_fill(budget, demands)
    assert sum(shares) == min(budget, sum(demands))
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    unmet = [share for share, demand in zip(shares, demands, strict=True) if share < demand]
    assert all(share <= min(unmet) + 1 for share in shares) if unmet else True
    assert unmet == sorted(unmet, reverse=True)


@pytest.mark.parametrize(
    ("budget", "demands", "tenants", "shares"),
    [
        (8, [9, 9, 9], "AAB", [2, 2, 4]),
        (8, [9, 9, 2], "AAB", [3, 3, 2]),
        (8, [9, 9, 9], "AAA", [3, 3, 2]),
        (3, [9, 9, 9, 9], "AABC", [1, 0, 1, 1]),
        (100, [3, 1, 7], "ABC", [3, 1, 7]),
        (5, [], "", []),
    ],
)
def test_fair_shares(budget: int, demands: list[int], tenants: str, shares: list[int]) -> None:
    assert share_fairly(budget, demands, tenants) == shares


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(1, 30), st.sampled_from("AB")), max_size=9))
def test_a_tenant_gets_half_however_many_prompts_the_other_has(budget: int, work: list[tuple[int, str]]) -> None:
    demands, tenants = [demand for demand, _ in work], [tenant for _, tenant in work]
    shares = share_fairly(budget, demands, tenants)
    assert sum(shares) == min(budget, sum(demands))
    for tenant in "AB":
        got, wants = (sum(n for n, t in zip(ns, tenants, strict=True) if t == tenant) for ns in (shares, demands))
        assert got >= min(wants, budget // 2)
