"""Asynchronous scheduling: what is started before the step in front of it is known, and what happens to it then."""

import pytest

from engine.decode_pipeline import DecodePipeline
from engine.engine import Engine
from engine.request import EngineRequest, FinishReason
from engine.sample import SampledToken
from pagewire.sampling import SamplingParams
from tests.engine.fake_engine import fake_engine
from tests.engine.fake_runner import EOS, FakeRunner, next_token
from tests.engine.harness import Harness, expected_outputs, prompt_of

ENDLESS = {"ignore_eos": True, "max_tokens": 30}


def started_rows(harness: Harness) -> list[str]:
    """The requests of the latest step that was started."""
    return [request_id for request_id, _, _ in harness.runner.steps[-1]]


def decoding(**limits: int) -> Harness:
    """A harness with one request that decodes."""
    harness = Harness(is_async=True, **limits)  # type: ignore[arg-type]
    harness.ask("a", 5, **ENDLESS)
    harness.step()
    return harness


def test_a_step_is_started_while_the_one_before_it_runs() -> None:
    harness = decoding()
    output = harness.step()
    assert [token.index for token in output.tokens] == [1]
    assert len(harness.runner.steps) == 3, "the prompt's, this one's and the one behind it"
    assert harness.pipeline.is_busy
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    assert len(harness.runner.steps) == 30, "the end by length is known ahead: nothing is computed behind it"


def test_whoever_ends_by_length_is_not_in_the_next_step() -> None:
    harness = decoding(max_model_len=12)
    harness.ask("b", 5, max_tokens=3, ignore_eos=True)
    harness.run()
    assert [sorted({row[0] for row in step}) for step in harness.runner.steps[3:5]] == [["a", "b"], ["a"]]
    harness.check_outputs()
    harness.check_idle()


def stopping(harness: Harness) -> None:
    """A request that draws EOS as its third token, which nobody can know."""
    for number in range(90 * 90):
        prompt = (5, 3 + number % 90, 3 + number // 90)
        request = EngineRequest("stops", prompt, SamplingParams(max_tokens=9))
        tokens, reason = expected_outputs(request, harness.max_model_len)[0]
        if (len(tokens), reason) == (3, FinishReason.STOP):
            harness.add(request)
            return
    raise AssertionError("no prompt does that")


def test_what_is_drawn_behind_a_stop_token_is_dropped_and_its_blocks_stay_taken_so_long() -> None:
    harness = Harness(is_async=True)
    stopping(harness)
    outputs = [harness.step() for _ in range(3)]
    assert outputs[-1].tokens[0].token_id == EOS
    assert not harness.scheduler.has_work
    assert harness.pipeline.is_busy, "one more step runs, for nothing"
    assert harness.cache.num_free < harness.num_blocks, "it may still write into the last block"
    assert harness.step().tokens == []
    harness.check_outputs()
    harness.check_idle()


def test_an_aborted_request_keeps_its_blocks_until_the_step_has_ended() -> None:
    harness = decoding()
    harness.step()
    held = harness.num_blocks - harness.cache.num_free
    assert harness.abort("a")
    assert harness.num_blocks - harness.cache.num_free == held
    assert harness.step().tokens == []
    harness.check_idle()


def test_blocks_that_are_given_up_for_cached_ones_are_not_filled_by_others_meanwhile() -> None:
    harness = Harness(is_async=True, num_blocks=16)
    for request_id in ("a", "b"):
        harness.ask(request_id, prompt_of(5), max_tokens=20, ignore_eos=True)
    while harness.has_work:
        harness.step()
        free = harness.cache.allocate(harness.cache.num_free)
        assert free is not None
        harness.runner.slots[free] = -7  # a transfer
        harness.cache.release(free)
    assert harness.runner.num_ahead > 10
    harness.check_outputs()
    harness.check_idle()


def test_who_waits_is_admitted_as_soon_as_there_is_room() -> None:
    harness = decoding(max_num_seqs=2)
    harness.step()
    harness.ask("b", 5, **ENDLESS)
    harness.step()
    harness.step()
    assert "b" in started_rows(harness)
    harness.ask("c", 5, max_tokens=2, ignore_eos=True)
    before = harness.runner.num_ahead
    for _ in range(6):
        harness.step()
    assert harness.runner.num_ahead >= before + 5, "c can't run: what it waits for does not wait for it"
    assert "c" not in started_rows(harness)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_who_waits_for_blocks_does_not_hold_up_the_others() -> None:
    harness = decoding(num_blocks=10, max_model_len=40)
    harness.ask("b", 36, max_tokens=2, ignore_eos=True)
    for _ in range(4):
        harness.step()
    before = harness.runner.num_ahead
    harness.step()
    assert harness.scheduler.load().num_waiting == 1
    assert harness.runner.num_ahead > before
    harness.run()
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"allowed_token_ids": tuple(range(97))},
        {"bad_words_token_ids": ((5, 6),)},
        {"logprobs": 2, "drawable_logprobs": True},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_reads_the_token_before_makes_steps_follow_one_another(params: dict[str, object]) -> None:
    harness = Harness(is_async=True)
    harness.ask("plain", 5, max_tokens=12, ignore_eos=True)
    harness.ask("reads", 6, max_tokens=5, ignore_eos=True, **params)
    while "reads" in harness.scheduler:
        harness.step()
    assert harness.runner.num_ahead == 0
    harness.run()
    assert harness.runner.num_ahead > 0, "the others go on ahead when it is gone"
    harness.check_outputs()
    harness.check_idle()


def engine_ahead() -> tuple[Engine, FakeRunner]:
    engine, runner = fake_engine()
    engine._pipeline = DecodePipeline(engine.scheduler, runner)
    return engine, runner


def test_the_engine_says_that_it_has_work_until_the_last_step_has_ended() -> None:
    engine, _ = engine_ahead()
    params = [SamplingParams(n=1 + i % 3, max_tokens=9, seed=1) for i in range(5)]
    prompts = [prompt_of(3 + 2 * i, salt=i) for i in range(5)]
    outputs = engine.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        expected = expected_outputs(EngineRequest("r", tuple(prompt), own), engine.max_model_len)
        assert output == [expected[choice][0] for choice in range(own.n)]
    assert engine.kv_cache.num_referenced == 0
    engine.close()


def test_a_step_that_fails_fails_those_of_the_step_before_it_too() -> None:
    engine, runner = engine_ahead()
    for request_id, max_tokens in (("long", 9), ("short", 3)):
        engine.add(EngineRequest(request_id, (5, 6, 7), SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    engine.step()
    engine.step()
    runner.fail_next = "device on fire"
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    failed = engine.fail_step("RuntimeError: device on fire").failed
    assert sorted(each.request_id for each in failed) == ["long", "short"]
    assert not engine.has_work
    assert engine.kv_cache.num_referenced == 0
    engine.close()


def test_a_row_that_cannot_be_drawn_fails_one_step_late_and_alone() -> None:
    engine, runner = engine_ahead()
    prompts = {"broken": (5, 6, 7), "good": (8, 9, 7)}
    for request_id, prompt in prompts.items():
        engine.add(EngineRequest(request_id, prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    engine.step()
    sample = runner._sample

    def break_one(item: object, num_tokens: int) -> list[SampledToken]:
        is_broken = item.sequence.request_id == "broken"  # type: ignore[attr-defined]
        return [SampledToken(-1, error="NaN")] if is_broken else sample(item, num_tokens)  # type: ignore[arg-type]

    runner._sample = break_one  # type: ignore[method-assign]
    outputs = []
    while engine.has_work:
        outputs.append(engine.step())
    assert [each.request_id for output in outputs for each in output.failed] == ["broken"]
    tokens = [each.token_id for output in outputs for each in output.tokens]
    seen = [8, 9, 7, next_token([8, 9, 7], 0)]
    for token in tokens:
        assert token == next_token(seen, 0)
        seen.append(token)
    assert len(tokens) == 3
    assert engine.kv_cache.num_referenced == 0
    engine.close()


def test_closing_waits_for_what_runs() -> None:
    engine, _ = engine_ahead()
    engine.add(EngineRequest("r", (5, 6, 7), SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    engine.step()
    assert engine._pipeline is not None
    assert engine._pipeline.is_busy
    engine.close()
    assert not engine._pipeline.is_busy
    assert engine.kv_cache.num_referenced == 0
