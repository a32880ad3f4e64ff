"""Whose blocks count: those of the process that is alive now, on its device and in its tiers."""

from collections.abc import Mapping, Sequence

from kvstore.memory_index import MemoryIndex
from kvstore.registry import WorkerRecord
from router.live_index import Depths, LiveIndex
from tests.router.tiered_index import TieredIndex

CHAIN = [bytes([number]) * 16 for number in range(8)]


def held(index: MemoryIndex, depths: Mapping[str, int]) -> None:
    for worker_id, depth in depths.items():
        index.register(WorkerRecord(worker_id, f"{worker_id}:1", "decode", 7), CHAIN[:depth])


def depths(index: MemoryIndex, worker_ids: Sequence[str], incarnation: int = 7) -> Depths:
    return LiveIndex(index).depths(CHAIN, dict.fromkeys(worker_ids, incarnation))


def test_of_those_that_are_asked_about() -> None:
    index = TieredIndex()
    held(index, {"a": 3, "b": 8, "c": 5})
    index.lower = {"host": {"a": 5, "c": 2}, "disk": {"a": 6, "b": 7}}
    assert depths(index, "ac") == Depths({"a": 3, "c": 5}, {"a": {"host": 2, "disk": 1}})


def test_what_a_former_process_or_an_unknown_one_holds_does_not_count() -> None:
    index = TieredIndex()
    held(index, {"a": 3})
    index.lower = {"host": {"a": 5, "z": 5}}
    assert depths(index, "a", incarnation=8) == Depths({}, {})
    assert depths(index, "z") == Depths({}, {})


def test_without_an_index_nobody_holds_anything() -> None:
    assert LiveIndex(None).depths(CHAIN, {"a": 7}) == Depths()
