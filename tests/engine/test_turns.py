"""Turns of processes that share cores: one at a time, in turn, and never a reason to stop."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine import turns
from engine.turns import VARIABLE, Turns, _lock, turns_of_environment


def test_who_had_a_turn_waits_until_the_other_has_had_one(tmp_path: Path) -> None:
    first, second, probe = (Turns(tmp_path) for _ in range(3))
    taken: list[str] = []

    def other() -> None:
        with second.one():
            taken.append("other")

    with first.one():
        thread = threading.Thread(target=other)
        thread.start()
        while _lock(probe._files[0], 0.0):  # until it stands at the door
            probe.close()
            probe = Turns(tmp_path)
            time.sleep(0.001)
        taken.append("first")
    with first.one():
        taken.append("first")
    thread.join()
    assert taken == ["first", "other", "first"]
    for each in (first, second, probe):
        each.close()


def test_who_is_frozen_holds_nobody_up_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(turns, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(turns.time, "sleep", slept.append)
    frozen, mine = Turns(tmp_path), Turns(tmp_path)
    with frozen.one():
        with mine.one():
            assert slept
        slept.clear()
        with mine.one():
            assert not slept, "it waits for the frozen one again"
    with mine.one():
        pass
    with frozen.one(), mine.one():
        assert slept, "it waits again once it has had a turn"
    frozen.close()
    mine.close()


def test_who_went_on_without_tries_again_after_a_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other was slow once, and its turns follow one another without a gap since."""
    slept: list[float] = []
    monkeypatch.setattr(turns, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(turns, "REST_SECONDS", 0.0)
    monkeypatch.setattr(turns.time, "sleep", slept.append)
    busy, mine = Turns(tmp_path), Turns(tmp_path)
    with busy.one():
        for _ in range(2):
            slept.clear()
            with mine.one():
                assert slept
    busy.close()
    mine.close()


def test_a_turn_ends_with_its_process(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from engine.turns import Turns; t = Turns(Path(sys.argv[1]))\n"
    code += "with t.one(): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    mine = Turns(tmp_path)
    assert all(_lock(file, 0.0) for file in mine._files)
    mine.close()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=rf"{VARIABLE} = '.*gone': No such file"):
        turns_of_environment()
