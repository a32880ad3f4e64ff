"""With a draft model, good or bad, every token and log-probability is that without it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.request import EngineRequest
from kernels import cpu
from kernels.cpu.recording import RecordedStep
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams, StructuredOutput
from tests.engine.model_harness import random_prompt
from tests.engine.test_speculation import PARAMS, run
from tests.tiny_models import make_tiny_model

CHOICE = StructuredOutput("choice", choices=("abcdefg", "hijk"))
REGEX = StructuredOutput("regex", "(ab[c-f]{3}gh, ){3,6}[0-9]+")
WORK = PARAMS | {
    "hot": SamplingParams(temperature=1.2, seed=9, max_tokens=30, top_k=40, min_p=0.01, logprobs=1, ignore_eos=True),
    "structured": SamplingParams(temperature=0.8, seed=3, max_tokens=20, structured_output=CHOICE),
    "regex": SamplingParams(temperature=0.0, max_tokens=40, structured_output=REGEX, logprobs=1),
    "few": SamplingParams(
        seed=4, max_tokens=25, ignore_eos=True, allowed_token_ids=(40, 41, 50, 60, 61), bad_words_token_ids=((40, 41),)
    ),
}
BLOCK_BYTES = 3 * 2 * 2 * 4 * 16 * 2
"""Of a block of 4 tokens of the tiny Llama in bfloat16."""


def requests() -> list[EngineRequest]:
    return [
        EngineRequest(name, tuple(2 * random_prompt(9 + 2 * i, seed=i).tolist()), params)
        for i, (name, params) in enumerate(WORK.items())
    ]


def options_of(model: Path, kernels: str = "native" if cpu.available() else "torch", **more: Any) -> EngineOptions:
    given: dict[str, Any] = {
        "model": str(model), "kernels": kernels, "dtype": "bfloat16", "block_size": 4, "max_num_seqs": 5,
        "max_num_batched_tokens": 24, "max_model_len": 160, "cpu_threads": 1, "kv_cache_memory_bytes": 43 * BLOCK_BYTES,
    }  # fmt: skip
    return EngineOptions(**{**given, **more})


def with_draft(options: EngineOptions, draft: Path, *, num_blocks: int = 43, **more: object) -> EngineOptions:
    """The same number of blocks for both models; the draft has as large ones."""
    config: dict[str, object] = {"num_speculative_tokens": 5, "max_catch_up_tokens": 16, "least_acceptance": 0}
    config = {key: value for key, value in (config | {"model": str(draft)} | more).items() if value is not None}
    memory = {"kv_cache_memory_bytes": 2 * num_blocks * BLOCK_BYTES}
    return options.model_copy(update={"speculative_config": json.dumps(config)} | memory)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape that says other things."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("stranger"), seed=9)


def run_all(options: EngineOptions) -> tuple[Any, int, int, Engine]:
    engine = Engine(options)
    try:
        tokens, drafts, _ = run(engine, requests())
    finally:
        engine.close()
    return tokens, sum(drafted for drafted, _ in drafts), sum(accepted for _, accepted in drafts), engine


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.nightly)])
def test_tokens_and_logprobs_are_those_without_a_draft_model(model: Path, stranger: Path, kernels: str) -> None:
    """In a batch of everything, with a pool so small that sequences are preempted."""
    if kernels == "native" and not cpu.available():
        pytest.skip("no native kernels")
    options = options_of(model, kernels)
    expected, _, _, _ = run_all(options)
    tokens, num_drafted, num_accepted, engine = run_all(with_draft(options, model))
    assert tokens == expected
    assert num_accepted == num_drafted > 100, "the same model with the same noise is always right"
    assert engine.scheduler.num_preemptions > 0
    tokens, num_drafted, num_accepted, engine = run_all(with_draft(options, stranger, pause_steps=2))
    assert tokens == expected
    assert num_drafted > 100
    assert num_accepted < num_drafted / 10
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_its_steps_run_from_a_record(model: Path, monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    """To the same drafts; one record each serves the draft model and the served one, whatever runs."""
    runs: Counter[int] = Counter()
    run_recorded = RecordedStep.run

    def counted(self: RecordedStep, *arguments: Any) -> torch.Tensor:
        runs[id(self)] += 1
        return run_recorded(self, *arguments)

    monkeypatch.setattr(RecordedStep, "run", counted)
    options = with_draft(options_of(model), model, quantization=quantization)
    expected = run_all(options.model_copy(update={"enforce_eager": True}))[:3]
    assert not runs
    assert run_all(options)[:3] == expected
    assert len(runs) == 2
    assert min(runs.values()) > 20


def test_the_draft_may_be_of_another_shape_dtype_and_quantization(model: Path, tiny_model: Callable[..., Path]) -> None:
    expected, _, _, _ = run_all(options_of(model))
    for draft, more in ((tiny_model("qwen3"), {"dtype": "float32"}), (model, {"quantization": "int8"})):
        tokens, num_drafted, num_accepted, _ = run_all(with_draft(options_of(model), draft, num_blocks=60, **more))
        assert tokens == expected
        assert num_drafted > 100
        assert num_accepted > 0.7 * num_drafted or draft != model


def test_quantized_model_drafted_for_by_its_original(model: Path) -> None:
    options = options_of(model, quantization="w8a8")
    expected, _, _, _ = run_all(options)
    tokens, num_drafted, num_accepted, _ = run_all(with_draft(options, model))
    assert tokens == expected
    assert num_drafted >= num_accepted > 0.5 * num_drafted


def test_it_pauses_where_drafts_cost_more_than_they_bring(model: Path, stranger: Path) -> None:
    """A draft as dear as the model itself is asked a few times at most."""
    _, num_drafted, num_accepted, _ = run_all(with_draft(options_of(model), stranger, least_acceptance=None))
    assert num_drafted - num_accepted < 40
