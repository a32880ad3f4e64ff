"""Adapters with the other features and on every path: the tokens are those of the merged model, alone, in one process.

{1P1D, 2P2D with a migration in mid-stream} × features, each request among others with another adapter and with none.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.text.tokenizer import Tokenizer
from tests.decode_svc.harness import make_engine
from tests.matrix.system import Result, in_one_process, system
from tests.matrix.test_features import FEATURES, work_of
from tests.tiny_adapters import make_adapter, merge

Logprob = tuple[float, int, tuple[tuple[int, float], ...]]
NAMES = ("greedy", "prompt_logprobs n", "penalties", "json_schema n logprobs")
ADAPTERS = ("one", "two")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(model, directory / name, seed=seed) for seed, name in enumerate(ADAPTERS)}


@pytest.fixture(scope="module")
def expected(
    model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Result]:
    """By adapter and feature; adapters are merged into the weights."""
    found = {}
    for adapter in ("", *ADAPTERS):
        path = merge(model, adapters[adapter], tmp_path_factory.mktemp("merged") / adapter) if adapter else model
        engine = make_engine(path, enable_prefix_caching=False)
        work = {name: work_of(FEATURES[name], Tokenizer.load(model)) for name in NAMES}
        found |= {(adapter, name): result for name, result in in_one_process(engine, work).items()}
        engine.close()
    return found


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "options"),
    [
        (1, 1, {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}),
        (2, 2, {}),
        pytest.param(0, 1, {"max_loras": 1}, marks=pytest.mark.nightly),
    ],
)
async def test_tokens_are_those_of_the_merged_model(
    model: Path,
    adapters: dict[str, Path],
    expected: dict[tuple[str, str], Result],
    num_prefill: int,
    num_decode: int,
    options: dict[str, Any],
) -> None:
    options |= {"enable_lora": True, "lora_modules": tuple(f"{name}={path}" for name, path in adapters.items())}
    migrates = num_decode > 1
    async with system(model, num_prefill=num_prefill, num_decode=num_decode, **options) as running:
        for name in NAMES:
            before = running.num_migrations
            call = FEATURES[name].call()
            calls = [replace(call, adapter="one"), replace(call, model="two"), call]
            break_after = 3 * call.sampling.n if migrates else None
            results = await asyncio.gather(
                running.generate(calls[0], break_after=break_after), *map(running.generate, calls[1:])
            )
            for adapter, result in zip((*ADAPTERS, ""), results, strict=True):
                wanted = expected[adapter, name]
                assert result.choices.keys() == wanted.choices.keys()
                for number, output in result.choices.items():
                    assert output.token_ids == wanted.choices[number].token_ids, (name, adapter, number)
                    assert output.finish == wanted.choices[number].finish
                    _check_close(output.logprobs, wanted.choices[number].logprobs, (name, adapter, number))
                _check_close(result.prompt_logprobs, wanted.prompt_logprobs, (name, adapter))
            assert (running.num_migrations > before) == migrates, name


def _check_close(found: list[Logprob], wanted: list[Logprob], what: object) -> None:
    """Merged weights are rounded otherwise, so the last digits differ."""
    assert len(found) == len(wanted), what
    for (logprob, _, top), (wanted_logprob, _, wanted_top) in zip(found, wanted, strict=True):
        assert logprob == pytest.approx(wanted_logprob, abs=1e-3), what
        values, wanted_values = ([value for _, value in each] for each in (top, wanted_top))
        assert values == pytest.approx(wanted_values, abs=1e-3), what


def test_the_adapters_change_what_is_expected(expected: dict[tuple[str, str], Result]) -> None:
    for name in NAMES:
        outputs = {str([c.token_ids for c in expected[adapter, name].choices.values()]) for adapter in ("", *ADAPTERS)}
        assert len(outputs) == 3, name
