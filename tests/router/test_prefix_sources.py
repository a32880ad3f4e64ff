"""Whom a prefilling worker is told to fetch from."""

from dataclasses import replace

from pagewire.worker_view import WorkerDescription, WorkerFingerprint
from router.prefix_sources import MAX_SOURCES, prefix_sources

FIT = WorkerFingerprint(b"r" * 32, "canonical", "f32", 4, (1024,))


def worker(name, role="decode", fingerprint=FIT):
    return WorkerDescription(name, 7, role, f"{name}:1", "m", fingerprint, 256, 64, 8, 64, 300)


def names(*arguments):
    return [source.worker_id for source in prefix_sources(*arguments)]


def test_the_longest_first_and_of_equals_prefill_workers():
    workers = [worker("d0"), worker("d1"), worker("p0", "prefill")]
    assert names(workers, {"d0": 3, "d1": 9, "p0": 3}, FIT) == ["d1", "p0", "d0"]
    (longest, *_) = prefix_sources(workers, {"d1": 9}, FIT)
    assert (longest.num_blocks, longest.role, longest.endpoint, longest.incarnation) == (9, "decode", "d1:1", 7)


def test_what_lies_below_the_device_can_be_fetched_too():
    workers = [worker("d0"), worker("d1"), worker("d2"), worker("p0", "prefill")]
    lower = {"d0": {"host": 4, "disk": 2}, "d2": {"disk": 1}, "p0": {"host": 6}}
    found = prefix_sources(workers, {"d0": 1, "d1": 7, "p0": 1}, FIT, lower=lower)
    assert [(each.worker_id, each.num_blocks, each.num_lower_blocks) for each in found] == [
        ("d1", 7, 0),
        ("p0", 7, 6),
        ("d0", 7, 6),
        ("d2", 1, 1),
    ]


def test_nobody_who_holds_nothing_does_not_fit_or_has_just_failed():
    other = replace(FIT, layout_id="amx")
    workers = [worker("d0"), worker("d1", fingerprint=other), worker("d2"), worker("d3")]
    assert names(workers, {"d0": 0, "d1": 5, "d2": 5, "d3": 4}, FIT, {("d2", 7)}) == ["d3"]
    assert names(workers, {"d2": 5}, FIT, {("d2", 6)}) == ["d2"], "another incarnation has failed"


def test_it_is_bounded():
    workers = [worker(f"d{i}") for i in range(20)]
    assert len(names(workers, {f"d{i}": i + 1 for i in range(20)}, FIT)) == MAX_SOURCES
