"""Several choices: one prefill, fork, copy on write; resumed requests; adopted KV."""

import pytest

from engine.request import AdoptedKv, ChoiceState, FinishReason
from tests.engine.fake_runner import next_token
from tests.engine.harness import Harness, prompt_of


def _outputs(prompt: list[int], choice: int, num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, choice))
    return tuple(tokens[len(prompt) :])


def _adopt(harness: Harness, tokens: list[int]) -> AdoptedKv:
    """Blocks that a transfer has filled with the KV of `tokens`."""
    blocks = harness.cache.allocate(harness.cache.num_blocks_for(len(tokens)))
    assert blocks is not None
    for position, token in enumerate(tokens):
        harness.runner.slots[blocks[position // 4], position % 4] = token
    return AdoptedKv(tuple(blocks), len(tokens))


def _num_computed(harness: Harness) -> int:
    return sum(num for step in harness.runner.steps for _, _, num in step)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8])
def test_the_prompt_is_prefilled_once_and_shared(num_tokens: int) -> None:
    harness = Harness(num_blocks=40)
    harness.ask("r", num_tokens, n=3, max_tokens=6, ignore_eos=True)
    harness.step()
    assert [len(harness.tokens["r", choice]) for choice in range(3)] == [1, 1, 1]
    assert harness.cache.num_referenced == -(-num_tokens // 4)
    harness.step()
    # A partial block is copied for all but one, who writes in place; each copy is followed by its own growth.
    assert harness.runner.num_copies == (2 if num_tokens % 4 else 0)
    harness.run()
    assert _num_computed(harness) == num_tokens + 3 * 5
    harness.check_outputs()
    harness.check_idle()


def test_choices_end_on_their_own_the_first_token_included() -> None:
    harness = Harness(num_blocks=40)
    prompt = prompt_of(6)
    first = [next_token(prompt, choice) for choice in range(3)]
    assert len(set(first)) == 3
    harness.ask("r", prompt, n=3, max_tokens=5, stop_token_ids=(first[1],), ignore_eos=True)
    harness.step()
    assert harness.reasons == {("r", 1): FinishReason.STOP}
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_trunk_keeps_slots_for_its_choices() -> None:
    harness = Harness(num_blocks=40, max_num_seqs=4)
    harness.ask("three", 5, n=3, max_tokens=4, ignore_eos=True)
    harness.ask("two", 5, n=2, max_tokens=4, ignore_eos=True)
    assert harness.step().load.num_running == 3
    assert {request_id for request_id, _, _ in harness.runner.steps[0]} == {"three"}
    harness.run()
    harness.check_outputs()


def test_more_choices_than_slots() -> None:
    harness = Harness(num_blocks=40, max_num_seqs=2)
    harness.ask("r", 7, n=5, max_tokens=6)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_many_choices_in_a_pool_for_one_sequence() -> None:
    harness = Harness(num_blocks=10, max_num_seqs=4)
    harness.ask("r", 13, n=4, max_tokens=None, ignore_eos=True)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    harness.check_outputs()
    harness.check_idle()


def test_a_resumed_request_goes_on_at_its_absolute_index() -> None:
    harness = Harness()
    prompt = prompt_of(6)
    done = _outputs(prompt, 0, 3)
    harness.ask("r", prompt, max_tokens=8, ignore_eos=True, choices=(ChoiceState(0, done),))
    output = harness.step()
    assert [(token.index, token.choice) for token in output.tokens] == [(3, 0)]
    harness.run()
    assert [*done, *harness.tokens["r", 0]] == list(_outputs(prompt, 0, 8))
    harness.check_idle()


def test_finished_choices_are_not_continued_and_unlisted_ones_start() -> None:
    harness = Harness()
    prompt = prompt_of(6)
    states = (ChoiceState(1, _outputs(prompt, 1, 2)), ChoiceState(2, _outputs(prompt, 2, 1), finished=True))
    harness.ask("r", prompt, n=3, max_tokens=5, ignore_eos=True, choices=states)
    harness.run()
    assert [len(harness.tokens["r", choice]) for choice in range(3)] == [5, 3, 0]
    harness.check_outputs()
    harness.check_idle()


def test_resumed_choices_compute_their_prompt_once() -> None:
    harness = Harness(enable_caching=False, num_blocks=40, max_num_batched_tokens=32)
    prompt = prompt_of(9)
    states = tuple(ChoiceState(choice, _outputs(prompt, choice, 2)) for choice in range(3))
    harness.ask("r", prompt, n=3, max_tokens=3, ignore_eos=True, choices=states)
    harness.run()
    assert _num_computed(harness) == 9 + 3 * 2
    harness.check_outputs()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_adopted_kv_is_decoded_at_once(num_tokens: int) -> None:
    """Disaggregation: the prompt's KV came from elsewhere, so did the first token."""
    harness = Harness()
    prompt = prompt_of(num_tokens)
    adopted = _adopt(harness, prompt)
    states = (ChoiceState(0, _outputs(prompt, 0, 1)),)
    harness.ask("r", prompt, max_tokens=7, ignore_eos=True, choices=states, adopted=adopted)
    harness.run()
    assert all(step == [("r", 0, 1)] for step in harness.runner.steps)
    harness.check_outputs()
    harness.check_idle()
    harness.ask("again", [*prompt, 5], max_tokens=1)
    harness.run()
    assert harness.cached["again"] == num_tokens // 4 * 4  # adopted blocks are findable


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8])
def test_adopted_kv_is_shared_by_choices(num_tokens: int) -> None:
    harness = Harness(num_blocks=40)
    prompt = prompt_of(num_tokens)
    adopted = _adopt(harness, prompt)
    states = tuple(ChoiceState(choice, _outputs(prompt, choice, 1)) for choice in range(3))
    harness.ask("r", prompt, n=3, max_tokens=5, ignore_eos=True, choices=states, adopted=adopted)
    assert harness.cache.num_referenced == len(adopted.block_ids)
    harness.step()
    assert _num_computed(harness) == 3
    assert harness.runner.num_copies == (2 if num_tokens % 4 else 0)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("num_adopted", range(10))
def test_a_part_of_the_kv_is_adopted_and_the_rest_computed(num_adopted: int) -> None:
    """P died in mid-pull: D keeps what it verified."""
    harness = Harness(enable_caching=False)
    prompt = prompt_of(10)
    harness.ask("r", prompt, max_tokens=5, ignore_eos=True, adopted=_adopt(harness, prompt[:num_adopted]))
    harness.run()
    assert _num_computed(harness) == 10 - num_adopted + 4
    harness.check_outputs()
    harness.check_idle()


def test_the_whole_prompt_is_adopted_without_a_first_token() -> None:
    harness = Harness()
    for request_id, n in (("one", 1), ("two", 2)):
        prompt = prompt_of(8, salt=n)
        harness.ask(request_id, prompt, n=n, max_tokens=5, adopted=_adopt(harness, prompt))
        harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_adopted_duplicates_are_exchanged_for_cached_blocks() -> None:
    harness = Harness()
    prompt = prompt_of(8)
    harness.ask("warm", prompt, max_tokens=1)
    harness.run()
    adopted = _adopt(harness, prompt)
    harness.ask("r", [*prompt, 5], max_tokens=4, adopted=adopted)
    assert harness.cache.num_referenced == 2
    assert all(harness.cache.ref_count(block_id) == 0 for block_id in adopted.block_ids)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_one_token_prompt_has_nothing_to_share() -> None:
    harness = Harness()
    prompt = prompt_of(1)
    states = (ChoiceState(1, _outputs(prompt, 1, 1)),)
    harness.ask("r", prompt, n=2, max_tokens=4, choices=states, adopted=_adopt(harness, prompt))
    harness.run()
    harness.check_outputs()
    harness.check_idle()
