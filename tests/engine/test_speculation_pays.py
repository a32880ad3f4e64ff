"""Speculation against a clock that is given: near the best where drafts come true, never much below without it."""

from random import Random
from statistics import median

import pytest

from engine.draft_trial import speed_up
from engine.speculation import Speculator
from pagewire.speculative import SpeculativeConfig
from tests.engine.speculated import DraftModel, Outcome, Times, say


def say_all(
    shares: list[float], *, num_tokens: int = 96, num_prompt_tokens: int = 10, times: Times | None = None, seed: int = 1
) -> list[Outcome]:
    """One sequence after another in one engine; of the drafts of each such a share comes true."""
    model, times, rng = DraftModel(), times or Times(), Random(seed)
    speculator = Speculator(SpeculativeConfig(), model, cost=0.5)
    return [
        say(speculator, model, share, num_tokens, rng, times=times, num_prompt_tokens=num_prompt_tokens)
        for share in shares
    ]


def overall(outcomes: list[Outcome]) -> float:
    """Of sequences with equally many tokens."""
    return len(outcomes) / sum(1 / each.speed_up for each in outcomes)


@pytest.mark.parametrize("draft", [0.2, 0.55, 0.9])
@pytest.mark.parametrize("share", [0.0, 0.17, 0.4, 0.58])
def test_where_drafts_do_not_pay_little_is_lost(share: float, draft: float) -> None:
    """In each of the sequences, whatever luck it has."""
    outcomes = say_all([share] * 30, times=Times(draft=draft))
    assert min(each.speed_up for each in outcomes) >= 0.965
    assert overall(outcomes) >= 0.98


def test_a_draft_that_is_much_dearer_than_its_bytes_is_left_alone() -> None:
    assert overall(say_all([0.5] * 40, times=Times(draft=3.0))) >= 0.98


@pytest.mark.parametrize(("share", "least"), [(0.85, 0.93), (0.94, 0.95), (1.0, 0.97)])
def test_where_drafts_pay_it_is_near_the_best(share: float, least: float) -> None:
    times = Times()
    best = max(speed_up(share, times.draft + times.row, num_drafts) for num_drafts in range(5))
    assert overall(say_all([share] * 40)) > least * best


def test_it_keeps_what_acceptance_and_cost_allow() -> None:
    """The standard formula takes checking as free, so what it costs here is missing."""
    outcomes = say_all([0.94] * 30)
    assert median(each.speed_up / each.allowed for each in outcomes) > 0.95


def test_who_speaks_after_better_ones_loses_no_more() -> None:
    """What is usual is no reason to begin with many drafts."""
    outcomes = say_all([0.95, 0.95, 0.95, 0.1, 0.1, 0.1] * 10)
    assert min(each.speed_up for i, each in enumerate(outcomes) if i % 6 >= 3) >= 0.97
    assert overall([each for i, each in enumerate(outcomes) if i % 6 < 3]) > 1.2


def test_a_long_prompt_is_not_read_in_vain() -> None:
    """It takes 14 steps: the model reads it where drafts come true, and rarely to see whether they do by now."""
    outcomes = say_all([0.1] * 40, num_prompt_tokens=480)
    assert sum(each.num_drafted > 0 for each in outcomes) <= 5
    assert overall(outcomes) >= 0.98
    assert median(each.speed_up for each in say_all([1.0] * 40, num_prompt_tokens=480)) > 1.1


def test_a_text_that_becomes_predictable_is_found_out() -> None:
    """A draft model as good as the model itself, after many sequences of which it knew nothing."""
    outcomes = say_all([0.0] * 40 + [1.0] * 10)
    assert overall(outcomes[-5:]) > 1.3


def test_decisions_depend_on_nothing_but_the_past() -> None:
    assert say_all([0.7] * 5) == say_all([0.7] * 5)
