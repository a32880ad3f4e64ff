"""The model of most tests here, and what the prompt of `plane_faults` yields with it."""

from pathlib import Path

import pytest

from tests.decode_svc.harness import reference
from tests.decode_svc.plane_faults import PARAMS, PROMPT


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return reference(model, [(PROMPT, PARAMS)])[0][0]
