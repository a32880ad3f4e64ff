"""Steps that take about as long as asked: the pace on machines of known speed, in a plan, and in an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import EngineRequest
from engine.step_pace import LEAST_TOKENS, StepPace
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.harness import Harness

TARGET = 0.25


def settle(pace: StepPace, fixed: float, each: float, num_decodes: int = 0) -> float:
    """Seconds of a step, after some, on a machine where it takes fixed + each · tokens."""
    for _ in range(60):
        num_tokens = pace.for_prompts(num_decodes) + num_decodes
        seconds = fixed + each * num_tokens
        pace.observe_step(num_tokens, seconds)
    return seconds


@pytest.mark.parametrize("num_decodes", [0, 12])
@pytest.mark.parametrize(("fixed", "each"), [(0.0, 0.004), (0.04, 0.004), (0.1, 0.001), (0.01, 0.0006)])
def test_steps_come_to_take_the_time_that_was_asked_for(fixed: float, each: float, num_decodes: int) -> None:
    assert settle(StepPace(TARGET, 512), fixed, each, num_decodes) == pytest.approx(TARGET, rel=0.1)


def test_a_fast_machine_has_all_tokens_and_a_slow_one_a_few() -> None:
    fast, slow = StepPace(TARGET, 512), StepPace(TARGET, 512)
    assert fast.for_prompts(0) == slow.for_prompts(0) == 512  # nothing is known yet
    settle(fast, 0.01, 0.0001)
    settle(slow, 0.3, 0.05)
    assert (fast.for_prompts(0), slow.for_prompts(0)) == (512, LEAST_TOKENS)
    assert StepPace(TARGET, 16).for_prompts(400) == 16


def test_a_machine_that_gets_faster_or_had_small_steps_recovers() -> None:
    pace = StepPace(TARGET, 512)
    settle(pace, 0.04, 0.02)
    for _ in range(50):
        pace.observe_step(4, 0.05)
    assert settle(pace, 0.04, 0.001) == pytest.approx(TARGET, rel=0.1)


def test_a_plan_keeps_to_it_and_decodes_count() -> None:
    pace = StepPace(TARGET, 100)
    for _ in range(60):
        pace.observe_step(50, TARGET)
    harness = Harness(max_num_batched_tokens=100, max_model_len=200, num_blocks=80, pace=pace)
    harness.ask("decodes", 3, max_tokens=9, ignore_eos=True)
    harness.step()
    harness.ask("long", 120, max_tokens=1)
    harness.ask("short", 9, max_tokens=1)
    harness.step()
    assert {request_id: num for request_id, _, num in harness.runner.steps[1]} == {"decodes": 1, "long": 40, "short": 9}
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_an_engine_measures_its_steps_and_says_the_same(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One millisecond is too little for more than the least chunk on any machine that runs this."""
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    prompt = tuple(5 + i * 7 % 60 for i in range(200))

    def steps(**options: Any) -> tuple[list[int], list[int]]:
        fields = {"block_size": 4, "kernels": "reference", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 20}
        engine = Engine(EngineOptions(model=str(tiny_model("llama")), max_model_len=256, **fields, **options))
        engine.add(EngineRequest("r", prompt, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
        chunks, tokens = [], []
        while engine.has_work:
            output = engine.step()
            chunks.append(output.num_prefill_tokens)
            tokens += [token.token_id for token in output.tokens]
        engine.scheduler.check_integrity()
        engine.close()
        return [chunk for chunk in chunks if chunk], tokens

    whole, expected = steps()
    assert whole == [200]
    chunks, tokens = steps(target_step_ms=1, max_num_batched_tokens=64)
    assert chunks[0] == 64
    assert set(chunks[2:-1]) == {LEAST_TOKENS}
    assert (sum(chunks), tokens) == (200, expected)
