"""The cost of a draft is what steps took that had some, whatever else the machine did meanwhile."""

from random import Random

import pytest

from engine.draft_costs import DraftCosts, ForwardTimes
from engine.draft_trial import STAKE, DraftTrial, speed_up


def test_a_line_through_what_was_measured() -> None:
    rng, times = Random(3), ForwardTimes()
    for _ in range(200):
        rows = rng.choice([1, 2, 5, 9])
        times.observe(rows, (0.010 + 0.002 * (rows - 1)) * rng.uniform(0.95, 1.05))
    assert times.row == pytest.approx(0.002, rel=0.15)
    assert times.of(3) == pytest.approx(0.014, rel=0.1)


def test_a_step_that_was_held_up_says_little() -> None:
    times = ForwardTimes()
    for step in range(120):
        times.observe(1 + 4 * (step % 2), 0.010 + 0.004 * (step % 2) + 2.0 * (step % 40 == 39))
    assert 0.009 < times.of(1) < 0.013
    assert times.row < 0.003


def test_steps_that_are_all_alike_leave_the_usual_slope() -> None:
    times = ForwardTimes()
    for _ in range(20):
        times.observe(1, 0.010)
    assert times.row == pytest.approx(0.0005)


def test_a_draft_that_turns_out_dearer_than_its_bytes() -> None:
    costs = DraftCosts(made=0.2)
    assert (costs.to_check(1), costs.to_make(1), costs.to_catch_up(20, 1)) == (0.05, 0.2, pytest.approx(0.2))
    assert costs.to_check(64) > 0.5, "where many run, a row more is what a token costs"
    costs.observe_drafting(1, 1, 90.0)  # the first one records its step
    for step in range(100):
        num_drafts = step % 5
        costs.observe_step(1 + num_drafts, 0.020 + 0.002 * num_drafts)
        if num_drafts:
            costs.observe_drafting(num_drafts, num_drafts + 1, 0.012 * num_drafts + 0.0012)
    assert costs.to_check(1) == pytest.approx(0.1, rel=0.15)
    assert costs.to_make(1) == pytest.approx(0.6, rel=0.15)
    assert costs.to_make(4) < costs.to_make(1), "one forward drafts for all"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.03, 0.3, 0.6, 0.95, 2.0])
def test_as_many_drafts_as_give_the_most_tokens_in_a_time(share: float, cost: float) -> None:
    trial = DraftTrial.begin(share, 1.0, 0.7)
    rates = [speed_up(share, cost, num_drafts) for num_drafts in range(9)]
    assert rates[trial.num_best(cost, 8)] == pytest.approx(max(rates))
    assert trial.num_best(cost, 3) <= 3


def test_the_standard_formula() -> None:
    assert speed_up(0.8, 0.1, 0) == 1
    assert speed_up(0.8, 0.1, 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8) / 1.3)
    assert speed_up(1.0, 0.5, 4) == pytest.approx(5 / 3)


def test_what_was_gained_may_be_lost_again() -> None:
    trial = DraftTrial.begin(0.6, 2, 0.7)
    assert trial.can_lose == STAKE
    trial.learn(2, 1, 0.5)
    assert trial.can_lose == STAKE
    trial.learn(4, 4, 0.5)
    assert trial.can_lose == STAKE + 2
    for _ in range(4):
        trial.learn(2, 0, 0.5)
    assert trial.can_lose == pytest.approx(STAKE - 2)
    trial.trust(0.5)
    assert trial.can_lose == pytest.approx(0.5)


def test_few_trials_tell() -> None:
    trial = DraftTrial.begin(0.6, 2, 0.7)
    assert [trial.num_likely(least, 4) for least in (0.0, 0.2, 0.5, 0.7)] == [4, 3, 1, 0]
    trial.learn(4, 0)
    assert trial.share < 0.4
    for _ in range(3):
        trial.learn(4, 4)
    assert trial.share > 0.9
