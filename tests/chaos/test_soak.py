"""The soak as a test: a minute in CI with the day's seed, ten under nightly; each prints its seed and its verdict."""

import datetime

import pytest

from tests.chaos.oracle import Stream
from tests.chaos.soak import run
from tests.chaos.soak_report import MAX_GROWTH_MIB, MemoryWatch, Tally, Use
from tests.chaos.soak_requests import Known

KNOWN = Known([1], {}, [[5, 6, 7], [5, 8]], ["abc", "ad"])


@pytest.mark.parametrize(
    ("outputs", "text", "stop", "is_right"),
    [
        ([[5, 6, 7], [5, 8]], ["abc", "ad"], "", True),
        ([[5, 6, 9], [5, 8]], ["abc", "ad"], "", False),
        ([[5, 6], [5, 8]], ["ab", "ad"], "", False),
        ([[5, 6, 7], [5, 8]], ["abc", "a"], "", False),
        ([[5, 6], [5, 8]], ["a", "ad"], "b", True),
        ([[5, 6], [5, 8]], ["ab", "ad"], "b", False),
        ([[5, 9], [5, 8]], ["a", "ad"], "b", False),
    ],
)
def test_the_comparison_can_fail(outputs: list[list[int]], text: list[str], stop: str, is_right: bool) -> None:
    assert (KNOWN.fault(Stream(outputs, text), stop) == "") == is_right


def test_the_memory_check_can_fail() -> None:
    for growth, is_fault in ((MAX_GROWTH_MIB - 1, False), (MAX_GROWTH_MIB + 1, True)):
        tally = Tally()
        uses = [Use(at, 100.0, 20) for at in range(10)] + [Use(10, 100.0 + growth, 20)]
        MemoryWatch.compare("d0", uses, tally)
        assert bool(tally.faults) == is_fault


@pytest.mark.timeout(600)
def test_half_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    seed = datetime.datetime.now(datetime.UTC).toordinal()
    with capsys.disabled():
        assert not run(minutes=0.5, seed=seed, block_size=(4, 16)[seed % 2]).faults, f"seed {seed}"


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("block_size", [4, 16])
def test_ten_minutes(capsys: pytest.CaptureFixture[str], block_size: int) -> None:
    seed = datetime.datetime.now(datetime.UTC).toordinal() + block_size
    with capsys.disabled():
        assert not run(minutes=10, seed=seed, block_size=block_size).faults, f"seed {seed}"
