"""Shares of a step: exact ones, and on random prompts who gets how much at least."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.token_budget import Prompt, share_out, water_fill


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


def _prompts(wanted: list[int], tenants: str = "", blocks: str = "") -> list[Prompt]:
    """`blocks`: a letter for what each computes next, a space for what is nobody else's."""
    return [
        Prompt(num, tenant.strip(), (0, num), block.encode() if block != " " else None)
        for num, tenant, block in zip(wanted, tenants or " " * len(wanted), blocks or " " * len(wanted), strict=True)
    ]


@pytest.mark.parametrize(
    ("budget", "wanted", "tenants", "shares"),
    [
        (8, [], "", []),
        (8, [5], "", [5]),
        (8, [20], "", [8]),
        (8, [9, 9, 9], "", [8, 0, 0]),
        (8, [9, 20, 2, 8], "", [4, 0, 2, 2]),
        (7, [9, 3], "", [4, 3]),
        (8, [2, 9, 3], "", [2, 3, 3]),
        (1, [9, 3], "", [1, 0]),
        (0, [3, 1], "", [0, 0]),
        (100, [3, 1, 7], "", [3, 1, 7]),
        (8, [9, 9, 2, 9], "AAAB", [2, 0, 2, 4]),
        (8, [9, 9, 2], "AAB", [6, 0, 2]),
        (3, [9, 9, 9, 9], "AABC", [1, 0, 1, 1]),
    ],
)
def test_the_front_has_half_and_the_shortest_the_rest(
    budget: int, wanted: list[int], tenants: str, shares: list[int]
) -> None:
    assert share_out(budget, _prompts(wanted, tenants)) == shares


def test_urgency_comes_before_what_a_prompt_wants() -> None:
    prompts = [Prompt(9, urgency=(0, 90)), Prompt(1, urgency=(1, 1)), Prompt(9, urgency=(0, 50))]
    assert share_out(8, prompts) == [4, 0, 4]


@pytest.mark.parametrize(
    ("wanted", "tenants", "blocks", "shares"),
    [
        ([9, 9, 9], "", "xxx", [9, 0, 0]),
        ([9, 3, 4], "", "xyy", [9, 3, 0]),
        ([9, 3, 4], "", "x  ", [9, 3, 4]),
        ([9, 9], "AB", "xx", [9, 9]),
        ([9, 9, 9, 90], "AAAB", "xxxy", [9, 0, 0, 31]),
    ],
    ids=["one for all", "the shorter one", "nothing in common", "other tenants", "what nobody can use is another's"],
)
def test_only_one_of_a_tenant_computes_a_block(wanted: list[int], tenants: str, blocks: str, shares: list[int]) -> None:
    assert share_out(40, _prompts(wanted, tenants, blocks)) == shares


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from("AB"), st.sampled_from("xyz  ")), max_size=9),
)
def test_what_a_tenant_and_its_first_prompt_get_at_least(budget: int, work: list[tuple[int, str, str]]) -> None:
    tenants, blocks = "".join(tenant for _, tenant, _ in work), "".join(block for _, _, block in work)
    prompts = _prompts([wanted for wanted, _, _ in work], tenants, blocks)
    shares = share_out(budget, prompts)
    assert sum(shares) <= min(budget, sum(p.num_wanted for p in prompts))
    assert all(0 <= share <= prompt.num_wanted for share, prompt in zip(shares, prompts, strict=True))
    for tenant in "AB":
        own = [(share, prompt) for share, prompt in zip(shares, prompts, strict=True) if prompt.tenant == tenant]
        if not own:
            continue
        least = min(own[0][1].num_wanted, budget // 2)
        assert own[0][0] >= min(own[0][1].num_wanted, (least + 1) // 2)
        at_work = [prompt.next_block for share, prompt in own if share and prompt.next_block is not None]
        assert len(at_work) == len(set(at_work))
        if all(prompt.next_block is None for _, prompt in own):
            assert sum(share for share, _ in own) >= min(sum(prompt.num_wanted for _, prompt in own), budget // 2)
