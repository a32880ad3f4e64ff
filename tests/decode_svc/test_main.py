"""How a decode worker starts."""

import asyncio
from types import SimpleNamespace

import pytest

from decode_svc import main
from pagewire import event_loop
from pagewire.config import EngineOptions, WorkerConfig


def test_its_loop_takes_events_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many streams bring blocks at once, and the device thread waits for whoever takes them up."""
    loops: list[object] = []

    async def serve(config: WorkerConfig, engine: object) -> None:
        loops.append(asyncio.get_running_loop())

    monkeypatch.setattr(main, "check_before_loading", lambda config: None)
    monkeypatch.setattr(main, "load_engine", lambda options: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(main, "_serve", serve)
    assert main.run(WorkerConfig(role="decode", engine=EngineOptions(model="m"))) == 0
    assert isinstance(loops[0], event_loop._Loop)
