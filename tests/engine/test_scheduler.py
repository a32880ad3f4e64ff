"""Who gets how many tokens: decode first, fair prompts, slots, order, the prefix cache, aborts, load."""

from collections import Counter

import pytest

from engine.request import EngineLoad, FinishReason
from engine.sample import SampledToken
from kvstore.kv_groups import HeldBlocks
from tests.engine.harness import Harness, prompt_of


def _computed(harness: Harness, step: int) -> dict[str, int]:
    return {request_id: num for request_id, _, num in harness.runner.steps[step]}


def test_one_request_alone() -> None:
    harness = Harness()
    harness.ask("r", 6, max_tokens=5)
    harness.run()
    assert [_computed(harness, i) for i in range(5)] == [{"r": 6}, {"r": 1}, {"r": 1}, {"r": 1}, {"r": 1}]
    assert harness.reasons["r", 0] is FinishReason.LENGTH
    harness.check_outputs()
    harness.check_idle()


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    harness = Harness(max_num_batched_tokens=8, num_blocks=30)
    harness.ask("long", 36, max_tokens=1)
    harness.step()
    harness.ask("short", 4, max_tokens=1)
    harness.step()
    assert _computed(harness, 1) == {"long": 4, "short": 4}
    assert ("short", 0) in harness.reasons
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_decodes_come_first_and_equal_prompts_are_computed_one_after_the_other() -> None:
    harness = Harness(max_num_batched_tokens=8, num_blocks=40)
    harness.ask("decodes", 3, max_tokens=9, ignore_eos=True)
    harness.step()
    harness.ask("a", 20, max_tokens=1)
    harness.ask("b", 20, max_tokens=1)
    harness.run()
    assert [_computed(harness, i) for i in range(1, 7)] == [
        {"decodes": 1, "a": 7},
        {"decodes": 1, "a": 7},
        {"decodes": 1, "a": 6, "b": 1},
        {"decodes": 1, "b": 7},
        {"decodes": 1, "b": 7},
        {"decodes": 1, "b": 5},
    ]
    harness.check_outputs()


def test_a_short_prompt_has_half_of_a_step_however_many_long_ones_there_are() -> None:
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=80)
    for i in range(6):
        harness.ask(f"long{i}", 36, max_tokens=1)
    harness.step()
    harness.ask("short", 7, max_tokens=1)
    harness.step()
    harness.step()
    assert [_computed(harness, i) for i in (1, 2)] == [{"long0": 4, "short": 4}, {"long0": 5, "short": 3}]
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_long_prompt_is_done_in_twice_the_time_whatever_comes_behind_it() -> None:
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=80)
    harness.ask("long", 36, max_tokens=1)
    for i in range(9):
        harness.ask(f"short{i}", 6, max_tokens=1)
        harness.step()
    assert ("long", 0) in harness.reasons
    assert all(_computed(harness, i)["long"] >= 4 for i in range(9))
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_of_one_tenant_a_better_priority_is_computed_first_and_another_tenant_has_its_half() -> None:
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=80)
    harness.ask("later", 12, max_tokens=1, priority=1, tenant="A")
    harness.ask("urgent", 20, max_tokens=1, tenant="A")
    harness.ask("other", 30, max_tokens=1, priority=2, tenant="B")
    harness.step()
    assert _computed(harness, 0) == {"urgent": 4, "other": 4}
    harness.run()
    harness.check_outputs()


def test_max_num_seqs_limits_and_waiting_is_first_come_first_served() -> None:
    harness = Harness(max_num_seqs=2, num_blocks=40)
    for name in "abcd":
        harness.ask(name, 4, max_tokens=3, ignore_eos=True)
    harness.run()
    assert [sorted(_computed(harness, i)) for i in (0, 3)] == [["a", "b"], ["c", "d"]]


def test_lower_priority_numbers_go_first() -> None:
    harness = Harness(max_num_seqs=1)
    harness.ask("first", 4, max_tokens=2, ignore_eos=True)
    harness.step()
    harness.ask("late", 4, max_tokens=1, priority=1)
    harness.ask("normal", 4, max_tokens=1)
    harness.ask("urgent", 4, max_tokens=1, priority=-1)
    harness.run()
    assert [next(iter(_computed(harness, i))) for i in range(5)] == ["first", "first", "urgent", "normal", "late"]


@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_a_hit_leaves_a_token_to_compute(num_tokens: int) -> None:
    """CASES F1, F6, F9: the second time gives the same tokens, whole number of blocks or not."""
    harness = Harness(num_blocks=40)
    prompt = prompt_of(num_tokens)
    for request_id in ("cold", "warm"):
        harness.ask(request_id, prompt, max_tokens=9)
        harness.run()
    assert (harness.cached["cold"], harness.cached["warm"]) == (0, min(num_tokens // 4 * 4, num_tokens - 1))
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("windows", [(None,), (None, 8), (None, 9), (8,)])
@pytest.mark.parametrize("kind", [{}, {"prefill_only": True}, {"n": 3}])
def test_of_whole_blocks_the_last_token_alone_is_computed(
    windows: tuple[int | None, ...], kind: dict[str, object]
) -> None:
    """Its block is copied: the cached one is not written to, and what was computed gives way to it again."""
    harness = Harness(num_blocks=80, windows=windows, max_num_seqs=12)
    prompt = prompt_of(12)
    harness.ask("cold", prompt, max_tokens=1)
    harness.run()
    for i in range(3):
        harness.ask(f"warm{i}", prompt, max_tokens=4, **kind)
    harness.step()
    # A window of 9 = 2 x 4 + 1 begins a block earlier for the last token than for the one behind it.
    num_computed = 4 if 9 in windows else 1
    assert harness.runner.steps[-1] == [(f"warm{i}", 0, num_computed) for i in range(3)]
    assert harness.runner.num_copies == (3 * len(harness.cache.groups) if num_computed == 1 else 0)
    assert all(harness.cached[f"warm{i}"] == 12 - num_computed for i in range(3))
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_equal_prompts_of_whole_blocks_come_together() -> None:
    """One computes them, the others a token each. Nobody waits for the block of his last token."""
    harness = Harness(num_blocks=80, max_num_batched_tokens=12)
    for i in range(3):
        harness.ask(f"r{i}", prompt_of(16), max_tokens=1)
    harness.run()
    assert harness.runner.steps == [[("r0", 0, 12)], [("r0", 0, 4), ("r1", 0, 4), ("r2", 0, 4)]]
    harness.ask("short", prompt_of(4, salt=1), max_tokens=1)
    harness.ask("long", [*prompt_of(4, salt=1), *prompt_of(20)], max_tokens=1)
    harness.step()
    harness.ask("late", [*prompt_of(4, salt=1), *prompt_of(8)], max_tokens=1)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_output_is_cached_too() -> None:
    harness = Harness()
    harness.ask("first", 6, max_tokens=8, ignore_eos=True)
    harness.run()
    conversation = [*harness.requests["first"].prompt_token_ids, *harness.tokens["first", 0], 5]
    harness.ask("second", conversation, max_tokens=1)
    harness.run()
    assert harness.cached["second"] == 12  # 13 of the 14 tokens had been computed, 12 are whole blocks
    stats = harness.cache.stats()
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (21, 12)
    harness.check_outputs()


@pytest.mark.parametrize("windows", [(None,), (8, None)])
def test_what_a_waiting_request_finds_is_not_evicted_by_those_before_it(windows: tuple[int | None, ...]) -> None:
    """What a router has counted on when it sent the request here."""
    harness = Harness(num_blocks=9 * len(windows), max_num_seqs=1, max_model_len=20, windows=windows)
    for name in ("first", "second", "third"):
        harness.ask(name, 9, max_tokens=1)
        harness.run()
    harness.ask("runs", 9, max_tokens=8, ignore_eos=True)
    harness.step()
    num_evictions = harness.cache.stats().num_evictions
    harness.ask("waits", list(harness.requests["first"].prompt_token_ids), max_tokens=1)
    harness.run()
    assert harness.cache.stats().num_evictions > num_evictions
    assert harness.cached["waits"] == 8
    harness.check_outputs()
    harness.check_idle()


def test_salts_do_not_share() -> None:
    """CASES D5, C10."""
    harness = Harness()
    for request_id, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        harness.ask(request_id, prompt_of(9), max_tokens=1, cache_salt=salt)
        harness.run()
    assert harness.cached == {"a": 0, "b": 0, "c": 8}


def test_without_caching_there_are_no_hits() -> None:
    harness = Harness(enable_caching=False)
    for request_id in ("a", "b"):
        harness.ask(request_id, prompt_of(9), max_tokens=3)
        harness.run()
    assert harness.cached == {"a": 0, "b": 0}
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
@pytest.mark.parametrize("prefill_only", [False, True])
def test_what_prompts_begin_with_is_computed_once(windows: tuple[int | None, ...], prefill_only: bool) -> None:
    """Four come together: 20 tokens in common, then 1 to 4 of their own."""
    harness = Harness(max_num_batched_tokens=8, num_blocks=80, windows=windows)
    for i in range(4):
        prompt = [*prompt_of(20), *prompt_of(1 + i, salt=1 + i)]
        harness.ask(f"r{i}", prompt, max_tokens=1, prefill_only=prefill_only)
    harness.run()
    computed = Counter(request_id for step in harness.runner.steps for request_id, _, num in step for _ in range(num))
    assert computed == {"r0": 21, "r1": 2, "r2": 3, "r3": 4}
    assert harness.cache.stats().num_hit_tokens == 3 * 20
    if prefill_only:
        assert [harness.held[f"r{i}"].num_cached_tokens for i in range(4)] == [0, 20, 20, 20]
    harness.check_outputs()
    harness.check_idle()


def test_who_has_more_in_common_waits_for_who_computes_it() -> None:
    """The shortest goes on where their ways part, the one in front is in nobody's way."""
    harness = Harness(max_num_batched_tokens=8, num_blocks=80)
    harness.ask("front", [*prompt_of(12), *prompt_of(12, salt=1)], max_tokens=1)
    harness.ask("short", [*prompt_of(12), *prompt_of(5, salt=2)], max_tokens=1)
    harness.ask("other", prompt_of(30, salt=3), max_tokens=1)
    for _ in range(3):
        harness.step()
    steps = [_computed(harness, i) for i in range(3)]
    assert steps == [{"front": 8}, {"front": 8}, {"front": 4, "short": 4}]
    harness.run()
    harness.check_outputs()


def test_a_hit_that_shrinks_while_it_is_taken_over_leaves_the_tables_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transfer's thread may evict a window between two looks: then there is nothing to take over."""
    harness = Harness(max_num_batched_tokens=8, num_blocks=80, windows=(None, 6))
    for i in range(2):
        harness.ask(f"r{i}", [*prompt_of(24), *prompt_of(6, salt=1 + i)], max_tokens=1)
    for _ in range(3):
        harness.step()
    nothing = [HeldBlocks() for _ in harness.cache.groups.groups]
    with monkeypatch.context() as patched:
        patched.setattr(harness.cache, "match_groups", lambda keys, tokens: nothing)
        harness.step()
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_block_computed_twice_ends_up_as_one() -> None:
    """Whoever wants a prompt's log-probabilities computes it, whatever others have of it."""
    harness = Harness(num_blocks=40)
    for request_id in ("a", "b"):
        harness.ask(request_id, prompt_of(8), max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    harness.step()
    harness.step()
    assert harness.cache.num_referenced == 4  # two shared, one more each
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_without_caching_nobody_waits_for_what_others_compute() -> None:
    harness = Harness(enable_caching=False, max_num_batched_tokens=16, num_blocks=40)
    for request_id in ("a", "b"):
        harness.ask(request_id, prompt_of(8), max_tokens=1)
    harness.step()
    assert _computed(harness, 0) == {"a": 8, "b": 8}
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_frees_everything_in_every_state(num_steps: int, n: int) -> None:
    """CASES A5: waiting, prefilling, forked, decoding, preempted."""
    harness = Harness(num_blocks=10, max_num_batched_tokens=6, max_num_seqs=4)
    harness.ask("other", 7, max_tokens=6)
    harness.ask("r", 14, n=n, max_tokens=12)
    for _ in range(num_steps):
        harness.step()
    assert harness.abort("r") is True
    assert harness.abort("r") is False
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_a_sampling_error_fails_its_request_alone() -> None:
    harness = Harness()
    harness.ask("bad", 5, n=2, max_tokens=6)
    harness.ask("good", 6, max_tokens=6)
    harness.step()
    schedule = harness.scheduler.schedule()
    sampled = harness.runner.execute(schedule)
    bad = next(i for i, item in enumerate(schedule.items) if item.sequence.request_id == "bad")
    sampled[bad] = [SampledToken(-1, error="logits are NaN")]
    output = harness.scheduler.update(schedule, sampled)
    assert [(failed.request_id, failed.message) for failed in output.failed] == [("bad", "logits are NaN")]
    assert [token.request_id for token in output.tokens] == ["good"]
    harness.scheduler.abort("good")
    harness.check_idle()


def test_the_load_counts_what_runs_waits_and_is_still_to_prefill_of_what_has_begun() -> None:
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=2, num_blocks=16)
    assert harness.scheduler.load() == EngineLoad(0, 0, 0, 16, 16)
    for name in "abc":
        harness.ask(name, 10, max_tokens=5, ignore_eos=True)
    assert harness.scheduler.load() == EngineLoad(0, 3, 0, 16, 16)
    output = harness.step()
    assert (output.load, output.admitted, output.cached) == (EngineLoad(2, 1, 2 + 10, 14, 16), ["a", "b"], [("a", 0)])
    output = harness.step()
    assert (output.load.num_tokens_to_compute, output.admitted, output.cached) == (4, [], [("b", 0)])
    assert harness.step().load == EngineLoad(2, 1, 0, 10, 16)
    harness.run()
    assert harness.scheduler.load() == EngineLoad(0, 0, 0, 16, 16)
