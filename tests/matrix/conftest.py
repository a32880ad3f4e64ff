"""What every path is compared with: each feature alone, in one process."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from offline.local import LocalBackend
from pagewire.text.tokenizer import Tokenizer
from router.model import ModelFacts
from tests.decode_svc.harness import make_engine
from tests.matrix.features import FEATURES, text_of, work_of
from tests.matrix.system import Result, in_one_process, result_of


@pytest.fixture(scope="package")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="package")
def expected(model: Path) -> dict[str, Result]:
    """Each alone, in one process, without a prefix cache that another has filled."""
    tokenizer = Tokenizer.load(model)
    engine = make_engine(model, enable_prefix_caching=False)
    try:
        found = {}
        for name, feature in FEATURES.items():
            if feature.is_the_routers:
                continue
            found |= in_one_process(engine, {name: work_of(feature, tokenizer)})
    finally:
        engine.close()
    for name, result in found.items():
        assert not FEATURES[name].is_the_routers
        for output in result.choices.values():
            skip = FEATURES[name].options.skip_special_tokens
            output.text = text_of(tokenizer, output, skip_special_tokens=skip)
    return found | asyncio.run(_by_the_router(model))


async def _by_the_router(model: Path) -> dict[str, Result]:
    """What the router does, still in one process."""
    backend = LocalBackend(make_engine(model, enable_prefix_caching=False), ModelFacts.load(model))
    await backend.begin()
    try:
        calls = {name: feature.call() for name, feature in FEATURES.items() if feature.is_the_routers}
        return {name: await result_of(backend, call) for name, call in calls.items()}
    finally:
        await backend.end()
