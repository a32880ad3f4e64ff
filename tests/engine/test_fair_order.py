"""Fair order between tenants: exact tags, first come first served for one tenant, bounded unfairness for several."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import fair_order
from engine.fair_order import FairOrder
from tests.engine.harness import Harness, prompt_of


def test_a_newcomer_waits_only_for_what_runs() -> None:
    order = FairOrder()
    flood = [order.tag(0, "A", 10) for _ in range(6)]
    assert flood == [0, 10, 20, 30, 40, 50]
    order.started(0, 20)
    assert [order.tag(0, "B", 10) for _ in range(3)] == [20, 30, 40]
    assert order.tag(0, "A", 10) == 60


def test_priorities_do_not_know_of_each_other() -> None:
    order = FairOrder()
    assert [order.tag(0, "A", 10), order.tag(1, "A", 10)] == [0, 0]
    order.started(1, 50)
    assert order.tag(0, "B", 1) == 0


def test_what_was_not_used_is_given_back_to_later_requests() -> None:
    order = FairOrder()
    order.tag(0, "A", 1000)
    order.give_back(0, "A", 990)
    assert order.tag(0, "A", 10) == 10
    order.give_back(0, "A", 5000)
    assert order.tag(0, "A", 10) == 10, "never before one that waits already"
    order.reset()
    assert order.tag(0, "A", 10) == 0
    assert len(order) == 1


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60), st.booleans()), max_size=40))
def test_one_tenant_is_served_in_order_of_arrival(steps: list[tuple[int, int, bool]]) -> None:
    order, tags = FairOrder(), [0]
    for cost, unused, starts in steps:
        tags.append(order.tag(0, "A", cost))
        order.give_back(0, "A", unused)
        if starts:
            order.started(0, tags[len(tags) // 2])
    assert tags == sorted(tags)


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_order, "MAX_FLOWS", 8)
    order = FairOrder()
    order.tag(0, "debtor", 1000)
    order.started(0, 500)
    for number in range(50):
        order.tag(0, f"t{number}", 0)
        assert len(order) <= 8
    assert order.tag(0, "debtor", 1) == 1000, "those that are owed nothing went first"
    for number in range(50):
        order.tag(0, f"u{number}", 10)
        assert len(order) <= 8


# --- in the scheduler ---


def finish_order(harness: Harness) -> list[str]:
    order: list[str] = []
    while harness.scheduler.has_work:
        harness.step()
        order += [r for r, _ in harness.reasons if r not in order]
    return order


def test_a_flood_does_not_starve_another_tenant() -> None:
    harness = Harness(max_num_seqs=2, num_blocks=64)
    for number in range(12):
        harness.ask(f"A{number}", 6, max_tokens=4, tenant="A", ignore_eos=True)
    harness.step()
    for number in range(3):
        harness.ask(f"B{number}", 6, max_tokens=4, tenant="B", ignore_eos=True)
    order = finish_order(harness)
    # Two of A run already; from then on they take turns.
    assert order.index("B0") <= 3
    assert order.index("B2") <= 8
    assert [name for name in order if name[0] == "A"] == [f"A{number}" for number in range(12)]
    harness.check_outputs()


def test_work_counts_and_not_requests() -> None:
    """A asks for long ones, B for short ones: B gets as many tokens, so more requests."""
    harness = Harness(max_num_seqs=1, num_blocks=64)
    for number in range(4):
        harness.ask(f"A{number}", 20, max_tokens=16, tenant="A", ignore_eos=True)
    for number in range(16):
        harness.ask(f"B{number}", 5, max_tokens=4, tenant="B", ignore_eos=True)
    order = finish_order(harness)
    first = Counter(name[0] for name in order[:10])
    assert first == {"A": 2, "B": 8}


def test_priority_comes_before_fairness() -> None:
    harness = Harness(max_num_seqs=1)
    harness.ask("A0", 4, max_tokens=2, tenant="A", ignore_eos=True)
    harness.ask("A1", 4, max_tokens=2, tenant="A", ignore_eos=True, priority=-1)
    harness.ask("B0", 4, max_tokens=2, tenant="B", ignore_eos=True)
    harness.ask("A2", 4, max_tokens=2, tenant="A", ignore_eos=True, priority=-1)
    assert finish_order(harness) == ["A1", "A2", "A0", "B0"]


def test_a_flood_of_prompts_gets_half_of_a_step() -> None:
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=64)
    for number in range(3):
        harness.ask(f"A{number}", prompt_of(30, salt=number), max_tokens=1, tenant="A")
    harness.ask("B", prompt_of(30, salt=9), max_tokens=1, tenant="B")
    schedule = harness.scheduler.schedule()
    shares = {item.sequence.request_id: item.num_new_tokens for item in schedule.items}
    assert shares == {"A0": 4, "B": 4}
