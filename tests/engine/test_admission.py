"""What can never run is refused at once, with the field and the numbers, and leaves nothing behind."""

from dataclasses import replace
from typing import Any

import pytest

from engine.admission import SchedulerConfig
from engine.errors import EngineError, RequestRefused
from engine.request import AdoptedKv, ChoiceState, EngineRequest
from kvstore.kv_groups import HeldBlocks
from pagewire.sampling import SamplingParams
from tests.engine.harness import Harness, prompt_of

FINE = EngineRequest("r", (5, 6, 7), SamplingParams(n=2, max_tokens=4))


@pytest.mark.parametrize(
    ("changes", "field", "message", "value", "limit"),
    [
        ({"prompt_token_ids": ()}, "prompt_token_ids", "must not be empty", 0, 1),
        ({"prompt_token_ids": (5, 97)}, "prompt_token_ids", "token id 97 is outside the vocabulary of 97", 97, 96),
        ({"prompt_token_ids": (-1,)}, "prompt_token_ids", "token id -1 is outside", -1, 96),
        ({"params": SamplingParams(n=0)}, "params.n", "must be at least 1, got 0", 0, 1),
        ({"params": SamplingParams(max_tokens=0)}, "params.max_tokens", "must be at least 1, got 0", 0, 1),
        ({"choices": (ChoiceState(2),)}, "choices", "choice 2 is listed twice or not below n = 2", "", None),
        ({"choices": (ChoiceState(0), ChoiceState(0))}, "choices", "choice 0 is listed twice", "", None),
        ({"choices": (ChoiceState(0, (99,)),)}, "choices", "token id 99 is outside", 99, 96),
        ({"choices": (ChoiceState(1, (5,) * 4),)}, "choices", "has 4 output tokens, max_tokens is 4", 4, 3),
        (
            {"choices": (ChoiceState(0, (), True), ChoiceState(1, (5,), True))},
            "choices",
            "every choice is finished",
            "",
            None,
        ),
        ({"adopted": AdoptedKv((), 1)}, "adopted", "0 blocks of 4 tokens cannot hold 1 of the 3 tokens", 1, 3),
        ({"adopted": AdoptedKv((), 4)}, "adopted", "cannot hold 4 of the 3 tokens", 4, 3),
    ],
)
def test_malformed_requests(
    changes: dict[str, Any], field: str, message: str, value: int | str, limit: int | None
) -> None:
    harness = Harness()
    with pytest.raises(RequestRefused, match=message) as refusal:
        harness.scheduler.add(replace(FINE, **changes))
    assert (refusal.value.field, refusal.value.value, refusal.value.limit) == (field, value, limit)
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, EngineError)
    harness.check_idle()


@pytest.mark.parametrize("prefill_only", [False, True])
def test_the_longest_prompt_leaves_room_for_one_token(prefill_only: bool) -> None:
    """CASES E6: limit - 1, limit, limit + 1."""
    harness = Harness(max_model_len=40)
    harness.ask("fits", 39, max_tokens=None, ignore_eos=True, prefill_only=prefill_only)
    harness.run()
    assert len(harness.tokens["fits", 0]) == 1
    for too_long in (40, 41):
        with pytest.raises(RequestRefused, match=rf"{too_long} tokens leave no room .* max_model_len 40 .*16 blocks"):
            harness.ask("long", too_long, prefill_only=prefill_only)
        harness.requests.pop("long")
    harness.check_outputs()
    harness.check_idle()


def test_output_counts_against_the_limit() -> None:
    harness = Harness(max_model_len=10)
    with pytest.raises(RequestRefused, match="10 tokens leave no room"):
        harness.ask("r", 6, choices=(ChoiceState(0, (5, 5, 5, 5)),))


@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_prompt_larger_than_the_pool_is_refused_at_once(prefill_only: bool) -> None:
    """CASES E1: it would wait for ever and block everybody behind it."""
    harness = Harness(num_blocks=8, max_model_len=32)
    harness.ask("fits", 31, prefill_only=prefill_only, max_tokens=1)
    harness.run()
    harness.check_outputs()
    with pytest.raises(RequestRefused, match=r"32 tokens leave no room .* 8 blocks of 4 tokens"):
        harness.ask("long", 32, prefill_only=prefill_only, max_tokens=1)
    harness.check_idle()


def test_a_limit_beyond_the_pool_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_model_len 33 does not fit the pool: 8 blocks of 4 tokens hold 32"):
        Harness(num_blocks=8, max_model_len=33)


def test_an_empty_prompt_does_not_harm_others() -> None:
    """CASES E5."""
    harness = Harness()
    harness.ask("before", 5, max_tokens=3)
    with pytest.raises(RequestRefused):
        harness.scheduler.add(EngineRequest("empty", (), SamplingParams()))
    harness.ask("after", 6, max_tokens=3)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_doubled_id_is_refused_and_the_first_owner_goes_on() -> None:
    """CASES A11."""
    harness = Harness()
    request = harness.ask("r", 5, max_tokens=6)
    harness.step()
    blocks = harness.cache.allocate(1)
    assert blocks is not None
    with pytest.raises(RequestRefused, match="'r' is in use already"):
        harness.scheduler.add(replace(request, adopted=AdoptedKv(tuple(blocks), 4)))
    harness.run()
    harness.check_outputs()
    harness.check_idle()  # the adopted block came back too
    harness.scheduler.add(EngineRequest("r", tuple(prompt_of(3)), SamplingParams(max_tokens=1)))
    assert harness.scheduler.abort("r")


@pytest.mark.parametrize("limits", [(0, 1, 4, 8), (8, 0, 4, 8), (8, 4, 0, 8), (8, 4, 4, 0), (3, 4, 4, 8)])
def test_impossible_limits(limits: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        SchedulerConfig(*limits)


@pytest.mark.parametrize(("first", "fits"), [(2, True), (3, False)])
def test_adopted_windows_reach_back_from_the_token_that_is_computed_again(first: int, fits: bool) -> None:
    """79 tokens are there, so token 78 is computed again: it sees 47 … 78, from block 2 on."""
    harness = Harness(num_blocks=16, block_size=16, max_model_len=96, windows=(None, 32))
    own, window = harness.cache.allocate(5) or [], harness.cache.allocate(5 - first) or []
    adopted = AdoptedKv(tuple(own), 79, 0, (HeldBlocks(first, tuple(window)),))
    if fits:
        harness.ask("r", 79, max_tokens=1, adopted=adopted)
        harness.abort("r")
    else:
        with pytest.raises(RequestRefused, match=r"KV group 1 has blocks 3 … 4 of 79 tokens; .* needs 2 … 4"):
            harness.ask("r", 79, max_tokens=1, adopted=adopted)
    harness.check_idle()
