"""How a prefill worker starts."""

import pytest

from pagewire.config import EngineOptions, WorkerConfig
from prefill_svc.main import engine_options


def test_it_loads_no_draft_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    given = EngineOptions(model="m", block_size=32)
    assert engine_options(WorkerConfig(role="prefill", engine=given)) == given
    assert not caplog.text
    speculative = given.model_copy(update={"speculative_config": '{"model": "x"}'})
    assert engine_options(WorkerConfig(role="prefill", engine=speculative)) == given
    assert "speculative_config is for decode workers" in caplog.text
