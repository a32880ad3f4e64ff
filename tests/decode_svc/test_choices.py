"""First tokens become part of the choices, and facts stay facts."""

from dataclasses import replace

from decode_svc.choices import merge_first_tokens, shared_token_ids
from engine.request import ChoiceState, EngineRequest
from pagewire.sampling import SamplingParams
from transfer_svc.client import FirstToken

FRESH = EngineRequest("r", (1, 2, 3), SamplingParams(n=2, max_tokens=5))


def test_fresh_choices():
    merged = merge_first_tokens(FRESH, [FirstToken(0, 0, 7, False), FirstToken(1, 0, 8, True)], 100)
    assert merged.choices == (ChoiceState(0, (7,), False), ChoiceState(1, (8,), True))
    assert shared_token_ids(FRESH) == (1, 2, 3)
    assert shared_token_ids(merged) == (1, 2, 3, 7)


def test_known_tokens_are_not_replaced():
    known = replace(FRESH, choices=(ChoiceState(0, (5, 6)), ChoiceState(1, (), True)))
    merged = merge_first_tokens(known, [FirstToken(0, 0, 9, False), FirstToken(1, 0, 9, False)], 100)
    assert merged.choices == known.choices
    assert merge_first_tokens(known, [FirstToken(0, 2, 9, False)], 100).choices[0] == ChoiceState(0, (5, 6, 9))


def test_a_choice_with_all_its_tokens_is_finished():
    one = replace(FRESH, params=SamplingParams(max_tokens=1))
    assert merge_first_tokens(one, [FirstToken(0, 0, 7, False)], 100).choices == (ChoiceState(0, (7,), True),)
    full = replace(FRESH, params=SamplingParams(max_tokens=None))
    assert merge_first_tokens(full, [FirstToken(0, 0, 7, False)], 4).choices == (ChoiceState(0, (7,), True),)
    assert merge_first_tokens(full, [FirstToken(0, 0, 7, False)], 5).choices == (ChoiceState(0, (7,), False),)
