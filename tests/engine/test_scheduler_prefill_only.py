"""Requests that end with their prompt: reserved blocks, progress, hand-over, never preempted."""

import pytest

from engine.request import ChoiceState, FinishReason
from tests.engine.fake_runner import EOS, next_token
from tests.engine.harness import Harness, prompt_of


def test_progress_after_every_step_and_the_kv_at_the_end() -> None:
    harness = Harness(max_num_batched_tokens=6)
    prompt = prompt_of(14)
    harness.ask("r", prompt, prefill_only=True, max_tokens=1)
    harness.run()
    progress, held = harness.progress["r"], harness.held["r"]
    assert [p.num_computed_tokens for p in progress] == [6, 12, 14]
    assert all(p.block_ids == held.block_ids and p.keys == held.keys for p in progress)
    assert held.keys == tuple(harness.cache.keys_for(prompt))
    assert (len(held.block_ids), len(held.keys), held.num_tokens, held.num_cached_tokens) == (4, 3, 14, 0)
    assert harness.runner.visible(held.block_ids, 14) == prompt
    assert harness.cache.num_referenced == 4
    assert ("r", 0) not in harness.reasons  # max_tokens is the router's business
    harness.check_outputs()
    harness.check_idle()


def test_all_blocks_are_reserved_at_admission() -> None:
    harness = Harness(num_blocks=10, max_num_batched_tokens=4)
    harness.ask("r", 22, prefill_only=True)
    harness.step()
    assert (len(harness.progress["r"][0].block_ids), harness.cache.num_free) == (6, 4)
    harness.ask("does not fit beside it", 17, prefill_only=True)
    harness.step()
    assert {request_id for request_id, _, _ in harness.runner.steps[-1]} == {"r"}
    harness.run_with_release()
    harness.check_outputs()
    harness.check_idle()


def test_it_is_never_preempted() -> None:
    """CASES A10: nothing is ever handed over empty."""
    harness = Harness(num_blocks=10, max_num_batched_tokens=5, max_num_seqs=4)
    harness.ask("decodes", 3, max_tokens=30, ignore_eos=True)
    harness.step()
    for i in range(4):
        harness.ask(f"p{i}", 15, prefill_only=True, priority=1)
    harness.run_with_release()
    for i in range(4):
        computed = [p.num_computed_tokens for p in harness.progress[f"p{i}"]]
        assert computed == sorted(set(computed))
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("n", [1, 3])
def test_first_tokens_of_all_choices(n: int) -> None:
    harness = Harness()
    prompt = prompt_of(7)
    stop = next_token(prompt, 0)
    harness.ask("r", prompt, n=n, prefill_only=True, max_tokens=1, stop_token_ids=(stop,))
    output = harness.step()
    assert [(token.choice, token.index, token.token_id) for token in output.tokens] == [
        (choice, 0, next_token(prompt, choice)) for choice in range(n)
    ]
    assert [token.finish_reason for token in output.tokens] == [FinishReason.STOP] + [None] * (n - 1)
    assert len(output.held) == 1
    harness.check_outputs()
    harness.check_idle()


def test_a_hit_is_reported_and_leaves_the_last_token() -> None:
    harness = Harness()
    prompt = prompt_of(8)
    for request_id in ("cold", "warm"):
        harness.ask(request_id, prompt, prefill_only=True)
        harness.run()
    assert (harness.held["cold"].num_cached_tokens, harness.held["warm"].num_cached_tokens) == (0, 7)
    assert harness.held["cold"].block_ids == harness.held["warm"].block_ids
    assert harness.cache.num_referenced == 2
    harness.check_idle()


@pytest.mark.parametrize("num_blocks", range(4, 9))
def test_whole_hits_in_a_small_pool(num_blocks: int) -> None:
    """Each takes a block more than the hit for as long as a step; all go on, be there room for one at a time."""
    harness = Harness(num_blocks=num_blocks, max_model_len=13)
    prompt = prompt_of(12)
    harness.ask("cold", prompt, prefill_only=True)
    harness.run_with_release()
    for i in range(4):
        harness.ask(f"warm{i}", prompt, prefill_only=True)
    harness.ask("other", 12, max_tokens=1)
    for i in range(4, 6):
        harness.ask(f"warm{i}", prompt, prefill_only=True)
    harness.run_with_release()
    assert harness.cached["warm0"] == 11
    harness.check_outputs()
    harness.check_idle()


def test_a_resumed_choice_is_prefilled_with_its_output() -> None:
    harness = Harness()
    prompt = prompt_of(6)
    output: list[int] = []
    for _ in range(3):
        output.append(next_token([*prompt, *output], 0, frozenset({EOS})))
    harness.ask("r", prompt, prefill_only=True, min_tokens=9, choices=(ChoiceState(0, tuple(output)),))
    step = harness.step()
    assert [(token.index, token.choice) for token in step.tokens] == [(3, 0)]
    assert step.held[0].num_tokens == 9
    harness.check_outputs()
    harness.check_idle()


def test_several_resumed_choices_share_the_prompt_alone() -> None:
    harness = Harness()
    states = (ChoiceState(0, (5, 6)), ChoiceState(1, (7,)))
    harness.ask("r", 6, n=2, prefill_only=True, choices=states)
    step = harness.step()
    assert (step.tokens, step.held[0].num_tokens) == ([], 6)
    harness.check_idle()


@pytest.mark.parametrize("num_steps", range(4))
def test_abort_in_mid_prefill(num_steps: int) -> None:
    """CASES B4: the slot and the blocks are free within one chunk."""
    harness = Harness(max_num_batched_tokens=4, max_num_seqs=1)
    harness.ask("long", 20, prefill_only=True)
    harness.ask("short", 3, prefill_only=True)
    for _ in range(num_steps):
        harness.step()
    harness.abort("long")
    harness.step()
    assert "short" in harness.held
    harness.check_idle()


def test_prefills_that_take_windows_on_the_way_do_not_wait_for_each_other_for_ever() -> None:
    """Both hold what they have, nothing is free: the worse one starts over, and what was handed out stays right."""
    harness = Harness(windows=(None, 5), num_blocks=24, max_num_batched_tokens=4, enable_caching=False)
    for name, num_tokens in (("first", 24), ("second", 20)):
        harness.ask(name, num_tokens, max_tokens=2, prefill_only=True)
    harness.step()
    taken = harness.cache.allocate(harness.cache.num_free) or []
    for _ in range(30):
        harness.step()
    assert harness.scheduler.num_preemptions > 0
    assert list(harness.held) == ["first"]
    harness.cache.release(taken)
    harness.run()
    held = harness.held["second"]
    assert held.wanted_from == (0, (16 - 5 + 1) // 4)
    assert [blocks.first for blocks in held.groups] == [0, 3]
    assert harness.runner.visible(held.block_ids, 20) == list(harness.requests["second"].prompt_token_ids)
    harness.check_outputs()
    harness.check_idle()
