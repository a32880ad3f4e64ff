"""A draft model on every path: {one process with preemption, 1P2D with a migration in mid-stream} × features."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.text.tokenizer import Tokenizer
from tests.decode_svc.harness import make_engine
from tests.matrix.features import FEATURES, check_equal, work_of
from tests.matrix.system import Result, in_one_process, system

FEW = ("greedy", "n", "prompt_logprobs n", "penalties", "stop_token_ids", "json_schema n logprobs")


def config(draft: Path) -> str:
    return json.dumps({"model": str(draft), "num_speculative_tokens": 3, "least_acceptance": 0})


@pytest.fixture(params=["the same", pytest.param("another", marks=pytest.mark.nightly)])
def draft(request: pytest.FixtureRequest, model: Path, tiny_model: Callable[..., Path]) -> Path:
    return model if request.param == "the same" else tiny_model("qwen3")


@pytest.mark.nightly
def test_together_with_preemption(expected: dict[str, Result], model: Path, draft: Path) -> None:
    tokenizer = Tokenizer.load(model)
    engine = make_engine(model, num_blocks=52, max_model_len=96, speculative_config=config(draft))
    try:
        alone = {name: feature for name, feature in FEATURES.items() if not feature.is_the_routers}
        found = in_one_process(engine, {name: work_of(feature, tokenizer) for name, feature in alone.items()})
        assert engine.scheduler.num_preemptions > 0, "the pool was too large to show anything"
    finally:
        engine.close()
    for name, result in found.items():
        check_equal(name, result, expected[name], with_text=False)


async def test_through_services(model: Path, draft: Path) -> None:
    tokenizer = Tokenizer.load(model)
    engine = make_engine(model)
    expected = in_one_process(engine, {name: work_of(FEATURES[name], tokenizer) for name in FEW})
    engine.close()
    async with system(model, num_prefill=1, num_decode=2, speculative_config=config(draft)) as running:
        for name in FEW:
            feature, before = FEATURES[name], running.num_migrations
            found = await running.generate(feature.call(), break_after=3 * feature.params.n)
            check_equal(name, found, expected[name], with_text=False)
            assert running.num_migrations > before, f"{name}: nothing has migrated"
