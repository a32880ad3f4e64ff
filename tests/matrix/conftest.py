"""What every path is compared with: each feature alone, in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.text.tokenizer import Tokenizer
from tests.decode_svc.harness import make_engine
from tests.matrix.features import FEATURES, text_of, work_of
from tests.matrix.system import Result, in_one_process


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
            found |= in_one_process(engine, {name: work_of(feature, tokenizer)})
    finally:
        engine.close()
    for name, result in found.items():
        for output in result.choices.values():
            skip = FEATURES[name].options.skip_special_tokens
            output.text = text_of(tokenizer, output, skip_special_tokens=skip)
    return found
