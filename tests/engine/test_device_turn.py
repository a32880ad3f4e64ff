"""Two processes that start on one GPU, and one on another."""

import threading
from pathlib import Path

import pytest

from engine.device_turn import device_turn


def test_one_starts_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    order = []

    def start() -> None:
        with device_turn("GPU-1"):
            order.append("second")

    other = threading.Thread(target=start)
    with device_turn("GPU-1"):
        other.start()
        with device_turn("GPU-2"):
            other.join(0.1)
        order.append("first")
    other.join(30)
    assert order == ["first", "second"]
