"""Turns of processes that share cores: one at a time, in turn, and never a reason to stop."""

import errno
import os
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from engine import turns
from engine.turns import VARIABLE, Turns, turns_of_environment


class Bell:
    """In the place of a lock's: it never rings, and knows who listens to it."""

    def __init__(self) -> None:
        self.num_polls = 0

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self.num_polls += 1
        return []


def has_waited(each: Turns) -> bool:
    """Whether its next turn comes only after a wait."""
    each._door._rung = each._turn._rung = bell = Bell()  # type: ignore[assignment]
    with each.one():
        return bell.num_polls > 0


def test_who_had_a_turn_waits_until_the_other_has_had_one(tmp_path: Path) -> None:
    first, second, probe = (Turns(tmp_path) for _ in range(3))
    taken: list[str] = []

    def other() -> None:
        with second.one():
            taken.append("other")

    with first.one():
        thread = threading.Thread(target=other)
        thread.start()
        while probe._door.take(0.0):  # until it stands at the door
            probe._door.give_up()
            time.sleep(0.001)
        taken.append("first")
    with first.one():
        taken.append("first")
    thread.join()
    assert taken == ["first", "other", "first"]
    for each in (first, second, probe):
        each.close()


def test_who_waits_hears_the_bell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the lock no more often than somebody rings."""
    monkeypatch.setattr(turns, "_LOOK_SECONDS", 600.0)
    monkeypatch.setattr(turns, "MOST_SECONDS", 600.0)
    first, second = Turns(tmp_path), Turns(tmp_path)
    num_turns = [0, 0]

    def take(number: int, mine: Turns) -> None:
        while min(num_turns) < 20:
            with mine.one():
                num_turns[number] += 1
                time.sleep(0.001)

    threads = [threading.Thread(target=take, args=pair, daemon=True) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"it sleeps after {num_turns} turns"
    first.close()
    second.close()


def test_a_bell_that_nobody_hears_never_stops_who_rings(tmp_path: Path) -> None:
    alone = Turns(tmp_path)
    for _ in range(70_000):  # a pipe holds 65 536
        alone._turn.give_up()
    alone.close()


def test_who_is_frozen_holds_nobody_up_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(turns, "_cpu_seconds", lambda pid: 7.0)
    frozen, mine = Turns(tmp_path), Turns(tmp_path)
    with frozen.one():
        assert has_waited(mine)
        assert not has_waited(mine), "it waits for the frozen one again"
    with mine.one():
        pass
    with frozen.one():
        assert has_waited(mine), "it waits again once it has had a turn"
    frozen.close()
    mine.close()


def test_who_is_slow_is_waited_for_at_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill of many seconds: the streams beside it get on, and are in its way as little as may be."""
    monkeypatch.setattr(turns, "MOST_SECONDS", 0.05)
    cpu_seconds = count(step=turns.WORKING_SHARE * 0.05)
    monkeypatch.setattr(turns, "_cpu_seconds", lambda pid: next(cpu_seconds) if pid == os.getpid() else 0.0)
    slow, mine = Turns(tmp_path), Turns(tmp_path)
    with slow.one():
        assert has_waited(mine)
        assert has_waited(mine)
    slow.close()
    mine.close()


def test_who_is_frozen_at_the_door_is_not_taken_for_who_had_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That was this process, which has other work as well: sending blocks, for example."""
    monkeypatch.setattr(turns, "MOST_SECONDS", 0.05)
    cpu_seconds = count(step=turns.WORKING_SHARE * 0.05)
    monkeypatch.setattr(turns, "_cpu_seconds", lambda pid: next(cpu_seconds) if pid == os.getpid() else 0.0)
    frozen, mine, third = (Turns(tmp_path) for _ in range(3))
    with mine.one():
        assert frozen._door.take(0.0)
        os.pwrite(frozen._door._file, (1).to_bytes(turns._PID_BYTES, "little"), 0)
        assert has_waited(third), "somebody at work has the turn"
        assert has_waited(third)
    assert has_waited(mine)
    assert not has_waited(mine), "it waits for the frozen one again"
    for each in (frozen, mine, third):
        each.close()


def test_a_full_disk_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", is_full)
    first, second = Turns(tmp_path), Turns(tmp_path)
    for each in (first, second, first):
        with each.one():
            pass
        each._waits_from = 0.0
    first.close()
    second.close()


def test_cpu_time_is_that_of_the_process() -> None:
    before, began = turns._cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert turns._cpu_seconds(os.getpid()) - before >= 0.05
    assert turns._cpu_seconds(0) == 0.0


def test_who_went_on_beside_a_frozen_one_tries_again_after_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(turns, "REST_SECONDS", 0.0)
    monkeypatch.setattr(turns, "_cpu_seconds", lambda pid: 7.0)
    frozen, mine = Turns(tmp_path), Turns(tmp_path)
    with frozen.one():
        assert has_waited(mine)
        assert has_waited(mine)
    frozen.close()
    mine.close()


def test_a_turn_ends_with_its_process(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from engine.turns import Turns; t = Turns(Path(sys.argv[1]))\n"
    code += "with t.one(): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    mine = Turns(tmp_path)
    assert mine._door.take(0.0)
    assert mine._turn.take(0.0)
    mine.close()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=rf"{VARIABLE} = '.*gone': No such file"):
        turns_of_environment()
