"""The engine as one piece: steps on a fake runner, and tiny real models through `generate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_parts
from engine.engine import Engine
from engine.errors import EngineError, RequestRefused
from engine.request import AdoptedKv, ChoiceState, EngineRequest, FinishReason
from engine.sample import SampledToken
from engine.tiers.disk_format import KV_VERSION
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.fake_engine import fake_engine
from tests.engine.harness import expected_outputs, prompt_of

PROMPTS = [list(range(10, 10 + num_tokens)) for num_tokens in (1, 3, 4, 5, 8, 17)]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, seed=7, n=3)


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def build(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    def make(family: str = "llama", **options: Any) -> Engine:
        fields = {"block_size": 4, "kernels": "reference", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 20}
        return Engine(EngineOptions(model=str(tiny_model(family)), **{**fields, **options}))

    return make


def test_generate_equals_the_oracle() -> None:
    engine, _ = fake_engine()
    params = [SamplingParams(n=1 + i % 3, max_tokens=9, seed=1) for i in range(5)]
    prompts = [prompt_of(3 + 2 * i, salt=i) for i in range(5)]
    outputs = engine.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        expected = expected_outputs(EngineRequest("r", tuple(prompt), own), engine.max_model_len)
        assert output == [expected[choice][0] for choice in range(own.n)]
    engine.scheduler.check_integrity()
    engine.close()


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    engine, runner = fake_engine(max_num_seqs=1)
    for request_id in ("runs", "waits"):
        engine.add(EngineRequest(request_id, (5, 6, 7), SamplingParams(max_tokens=2, ignore_eos=True)))
    runner.fail_next = "device on fire"
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    output = engine.fail_step("RuntimeError: device on fire")
    assert [(failed.request_id, failed.message) for failed in output.failed] == [
        ("runs", "RuntimeError: device on fire")
    ]
    assert (output.load.num_running, output.load.num_waiting) == (0, 1)
    assert [token.request_id for token in engine.step().tokens] == ["waits"]
    engine.close()
    assert engine.kv_cache.num_referenced == 0


def test_planning_that_fails_fails_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = fake_engine()
    for request_id in ("a", "b"):
        engine.add(EngineRequest(request_id, (5, 6, 7), SamplingParams(max_tokens=5)))
    engine.step()
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [failed.request_id for failed in engine.fail_step("bug").failed] == ["a", "b"]
    assert engine.kv_cache.num_referenced == 0
    engine.close()


def test_generate_reports_a_failure_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = fake_engine()
    monkeypatch.setattr(runner, "execute", lambda schedule: [[SampledToken(-1, error="NaN")] for _ in schedule.items])
    with pytest.raises(EngineError, match="generate-0: NaN"):
        engine.generate([[5], [6]], SamplingParams(max_tokens=3))
    assert not engine.has_work
    assert engine.kv_cache.num_referenced == 0
    engine.close()


def test_what_the_engine_tells_about_itself() -> None:
    engine, _ = fake_engine(num_blocks=9, max_model_len=30, max_num_seqs=2)
    limits = (engine.max_model_len, engine.num_blocks, engine.max_num_seqs, engine.max_num_batched_tokens)
    assert limits == (30, 9, 2, 16)
    assert (engine.root, engine.numerics_class) == (b"r" * 32, "fake/tp1")
    assert engine.layout_id == engine.memory.layout.layout_id
    assert (engine.load().num_blocks, engine.has_work, engine.is_stalled) == (9, False, False)
    engine.close()


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.nightly), "gemma3"])
def test_tokens_do_not_depend_on_blocks_chunks_cache_or_neighbours(build: Callable[..., Engine], family: str) -> None:
    reference = None
    for options in (
        {"block_size": 16},
        {"max_num_batched_tokens": 3},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 7},
        {"max_num_seqs": 2, "max_model_len": 28},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_seqs": 2, "enable_prefix_caching": False},
    ):
        engine = build(family, **options)
        outputs = [engine.generate(PROMPTS, GREEDY), engine.generate(PROMPTS, SAMPLED)]
        outputs.append([engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS])
        assert outputs[0] == outputs[2]
        reference = reference or outputs
        assert outputs == reference, options
        engine.scheduler.check_integrity()
        assert engine.kv_cache.num_referenced == 0
        engine.close()


def test_preemption_does_not_change_tokens(build: Callable[..., Engine]) -> None:
    roomy, tight = build(), build(kv_cache_memory_bytes=40 << 10)
    ahead = build(kv_cache_memory_bytes=40 << 10, async_scheduling=True)
    assert tight.num_blocks < 20
    params = SamplingParams(max_tokens=20, seed=3, n=2, ignore_eos=True)
    expected = roomy.generate(PROMPTS, params)
    assert expected == tight.generate(PROMPTS, params) == ahead.generate(PROMPTS, params)
    num_preemptions = [engine.scheduler.num_preemptions > 0 for engine in (roomy, tight, ahead)]
    assert num_preemptions == [False, True, True]
    for engine in (roomy, tight, ahead):
        engine.close()


def test_kv_moves_between_two_engines(build: Callable[..., Engine]) -> None:
    """Disaggregation in one process: prefill here, copy the blocks, decode there."""
    prefill, decode = build(), build()
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=8, seed=5, n=2)
        request = EngineRequest(f"r{i}", tuple(prompt), params, prefill_only=True)
        prefill.add(request)
        first, held = {}, None
        while held is None:
            step = prefill.step()
            first |= {token.choice: token for token in step.tokens}
            held = step.held[0] if step.held else None
        blocks = decode.kv_cache.allocate(len(held.block_ids))
        assert blocks is not None
        decode.memory.buffer[blocks] = prefill.memory.buffer[list(held.block_ids)]
        prefill.kv_cache.release(held.block_ids)
        states = tuple(
            ChoiceState(choice, (token.token_id,), token.finish_reason is not None) for choice, token in first.items()
        )
        outputs = [[state.output_token_ids[0]] for state in states]
        if not all(state.finished for state in states):
            adopted = AdoptedKv(tuple(blocks), held.num_tokens)
            decode.add(EngineRequest(f"r{i}", tuple(prompt), params, choices=states, adopted=adopted))
        else:
            decode.kv_cache.release(blocks)
        while decode.has_work:
            for token in decode.step().tokens:
                outputs[token.choice].append(token.token_id)
        assert outputs == prefill.generate([prompt], params)[0]
    assert prefill.kv_cache.num_referenced == decode.kv_cache.num_referenced == 0
    assert prefill.root == decode.root
    prefill.close()
    decode.close()


def test_eos_ends_with_stop(build: Callable[..., Engine]) -> None:
    engine = build()
    (eos,) = engine.config.eos_token_ids
    bias = SamplingParams(max_tokens=9, min_tokens=2, temperature=0.0, logit_bias={eos: 100.0})
    engine.add(EngineRequest("r", (9, 8, 7), bias))
    tokens = []
    while engine.has_work:
        tokens += engine.step().tokens
    assert [token.token_id == eos for token in tokens] == [False, False, True]
    assert tokens[-1].finish_reason is FinishReason.STOP
    engine.close()


def test_roots_tell_models_and_block_sizes_apart(
    build: Callable[..., Engine], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And releases whose code gives tokens other values."""
    roots = set()
    for family, options in (("llama", {}), ("llama", {"block_size": 16}), ("qwen3", {})):
        engine = build(family, **options)
        roots.add(engine.root)
        engine.close()
    parts = build_parts(EngineOptions(model=str(tiny_model("llama", seed=9)), block_size=4, cpu_threads=1))
    assert len(roots | {parts.kv_cache.root}) == 4
    parts.memory.close()
    monkeypatch.setattr("engine.build.KV_VERSION", KV_VERSION + 1)
    engine = build("llama")
    assert engine.root not in roots
    engine.close()


def test_loading_reports_progress(tiny_model: Callable[..., Path]) -> None:
    seen: list[tuple[int, int]] = []
    options = EngineOptions(model=str(tiny_model("llama")), cpu_threads=1)
    Engine(options, progress=lambda done, total: seen.append((done, total))).close()
    assert seen[-1][0] == seen[-1][1] > 0


def test_seats_are_limited_by_a_steps_tokens(build: Callable[..., Engine]) -> None:
    engine = build(max_num_batched_tokens=3)
    assert engine.max_num_seqs == 3
    engine.close()


def test_a_refused_request_names_the_lowered_limit(build: Callable[..., Engine]) -> None:
    engine = build(kv_cache_memory_bytes=12 << 10)
    with pytest.raises(
        RequestRefused, match=f"within max_model_len {engine.max_model_len} .*{engine.num_blocks} blocks"
    ):
        engine.check(EngineRequest("r", (5,) * engine.max_model_len, GREEDY))
    engine.close()
