"""When blocks run out: who gives way, that the best never does, and that nobody waits for ever."""

import pytest

from engine.request import AdoptedKv
from tests.engine.harness import Harness, prompt_of


def test_the_latest_gives_way_and_loses_no_token() -> None:
    harness = Harness(num_blocks=10, max_num_seqs=3)
    for name in "abc":
        harness.ask(name, 8, max_tokens=16, ignore_eos=True)
    first_to_wait = None
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    first_to_wait = {seq.request_id for seq in harness.scheduler._queues.waiting}
    assert first_to_wait == {"c"}
    assert harness.scheduler.load().num_tokens_to_compute == 8 + len(harness.tokens["c", 0])
    harness.run()
    harness.check_outputs()
    assert "c" in harness.cached
    harness.check_idle()


def test_lower_priority_gives_way_before_later_arrival() -> None:
    harness = Harness(num_blocks=10, max_num_seqs=3)
    harness.ask("unimportant", 8, max_tokens=16, ignore_eos=True, priority=5)
    for name in "ab":
        harness.ask(name, 8, max_tokens=16, ignore_eos=True)
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    assert {seq.request_id for seq in harness.scheduler._queues.waiting} == {"unimportant"}
    harness.run()
    harness.check_outputs()


def test_the_best_one_takes_part_in_every_step() -> None:
    harness = Harness(num_blocks=10, max_num_seqs=5, max_num_batched_tokens=8)
    harness.ask("best", 10, max_tokens=30, ignore_eos=True)
    for i in range(6):
        harness.ask(f"r{i}", 9, n=1 + i % 3, max_tokens=20, ignore_eos=True)
    while ("best", 0) not in harness.reasons:
        harness.step()
        assert "best" in {request_id for request_id, _, _ in harness.runner.steps[-1]}
    assert harness.scheduler.num_preemptions > 0
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_the_pool_holds_exactly_one_longest_sequence() -> None:
    harness = Harness(num_blocks=10, max_model_len=40)
    harness.ask("r", 30, max_tokens=None, ignore_eos=True)
    harness.ask("s", 3, max_tokens=None, ignore_eos=True)
    harness.run()
    assert [len(harness.tokens[name, 0]) for name in "rs"] == [10, 37]
    harness.check_outputs()
    harness.check_idle()


def test_admission_keeps_blocks_for_prompts_that_are_being_computed() -> None:
    """Else both would run into each other half-way and one's work would be lost."""
    harness = Harness(num_blocks=12, max_num_batched_tokens=8, max_num_seqs=2)
    harness.ask("a", 32, max_tokens=1)
    harness.ask("b", 32, max_tokens=1)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.check_outputs()


def test_failed_admission_holds_no_blocks() -> None:
    harness = Harness(num_blocks=10, max_num_seqs=3)
    harness.ask("warm", prompt_of(8), max_tokens=1)
    harness.run()
    harness.ask("big", 30, max_tokens=4, ignore_eos=True)
    harness.step()
    harness.ask("waits", [*prompt_of(8), *prompt_of(12, salt=9)], max_tokens=1)
    harness.step()
    assert harness.cache.num_referenced == harness.cache.num_blocks_for(31)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_what_holds_blocks_passes_one_that_waits_for_blocks() -> None:
    """CASES E3: transferred requests behind one that cannot start yet."""
    harness = Harness(num_blocks=10, max_num_seqs=4)
    harness.ask("running", 4, max_tokens=30, ignore_eos=True)
    harness.step()
    blocks = harness.cache.allocate(2)
    assert blocks is not None
    harness.runner.slots[blocks] = [prompt_of(4, salt=3), prompt_of(4, salt=4)]
    harness.ask("large", 30, max_tokens=3)
    harness.ask("small", 3, max_tokens=3)
    prompt = [*prompt_of(4, salt=3), *prompt_of(4, salt=4), 9]
    harness.ask("loaded", prompt, max_tokens=3, adopted=AdoptedKv(tuple(blocks), 8))
    harness.step()
    assert {request_id for request_id, _, _ in harness.runner.steps[-1]} == {"running", "loaded"}
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_blocks_of_waiting_requests_go_when_nothing_can_run() -> None:
    """Transferred requests hold all blocks, none has one to grow: one must recompute."""
    harness = Harness(num_blocks=10, max_num_seqs=4)
    for i in range(5):
        blocks = harness.cache.allocate(2)
        assert blocks is not None
        prompt = prompt_of(8, salt=i)
        harness.runner.slots[blocks] = [prompt[:4], prompt[4:]]
        harness.ask(f"r{i}", [*prompt, 9], max_tokens=5, ignore_eos=True, adopted=AdoptedKv(tuple(blocks), 8))
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("num_tokens", [8, 30])
def test_blocks_held_elsewhere_stall_nobody_for_ever(num_tokens: int) -> None:
    """While transfers hold the rest, a sequence that cannot grow gives its blocks back instead of sitting on them."""
    harness = Harness(num_blocks=10, max_num_batched_tokens=4)
    harness.ask("r", num_tokens, max_tokens=8, ignore_eos=True)
    harness.step()
    held = harness.cache.allocate(harness.cache.num_free)
    assert held is not None
    for _ in range(12):
        harness.step()
    assert harness.cache.num_free == 10 - len(held)
    stuck_at = len(harness.runner.steps)
    assert harness.step().tokens == []
    assert len(harness.runner.steps) - stuck_at <= 1
    harness.cache.release(held)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_decode_does_not_rob_a_better_prompt_nor_is_robbed_in_a_step_that_planned_it() -> None:
    harness = Harness(num_blocks=12, max_num_batched_tokens=8, max_num_seqs=3)
    harness.ask("later", 3, max_tokens=30, ignore_eos=True, priority=1)
    harness.step()
    harness.ask("better", 33, max_tokens=3, ignore_eos=True)
    harness.step()
    held = harness.cache.allocate(harness.cache.num_free - 1)
    assert held is not None
    for _ in range(4):
        harness.step()
    harness.cache.release(held)
    harness.run()
    computed = [num for step in harness.runner.steps for request_id, _, num in step if request_id == "better"]
    assert sum(computed) == 33 + 2
    harness.check_outputs()
    harness.check_idle()
