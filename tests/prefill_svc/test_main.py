"""How a prefill worker starts."""

import asyncio
from types import SimpleNamespace

import pytest

from pagewire import event_loop
from pagewire.config import EngineOptions, WorkerConfig
from prefill_svc import main
from prefill_svc.main import engine_options


def test_it_loads_no_draft_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    given = EngineOptions(model="m", block_size=32)
    assert engine_options(WorkerConfig(role="prefill", engine=given)) == given
    assert not caplog.text
    speculative = given.model_copy(update={"speculative_config": '{"model": "x"}'})
    assert engine_options(WorkerConfig(role="prefill", engine=speculative)) == given
    assert "speculative_config is for decode workers" in caplog.text


def test_its_loop_takes_events_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many streams bring blocks at once, and the device thread waits for whoever takes them up."""
    loops: list[object] = []

    async def serve(config: WorkerConfig, engine: object) -> None:
        loops.append(asyncio.get_running_loop())

    monkeypatch.setattr(main, "check_before_loading", lambda config: None)
    monkeypatch.setattr(main, "load_engine", lambda options: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(main, "_serve", serve)
    assert main.run(WorkerConfig(role="prefill", engine=EngineOptions(model="m"))) == 0
    assert isinstance(loops[0], event_loop._Loop)
