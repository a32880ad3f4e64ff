"""What a router remembers of adapters: who has started since gets them, what was unloaded stays so."""

from dataclasses import replace

import pytest

from pagewire.worker_view import AdapterLabel, AdapterView
from router.adapter_memory import AdapterMemory, Told

P, D, D_AGAIN = ("p", 1), ("d", 1), ("d", 2)


def view(name: str, generation: int, *, retired: bool = False) -> AdapterView:
    return AdapterView(AdapterLabel(name, b"%d" % generation, generation), 4, f"/{name}", 0, False, retired)


A, B, NEWER = view("a", 5), view("b", 6), view("a", 9)


def told(**views: tuple[AdapterView, ...]) -> list[Told]:
    names = {"p": P, "d": D, "again": D_AGAIN}
    return [Told(names[name], tuple(replace(each) for each in own)) for name, own in views.items()]


def test_a_new_process_lacks_what_others_have() -> None:
    memory = AdapterMemory()
    assert memory.observe(told(p=(A, B), d=(A, B))) == {}
    assert memory.observe(told(p=(A, B), again=())) == {D_AGAIN: [A, B]}
    assert memory.observe(told(p=(A, B), again=(B,))) == {D_AGAIN: [A]}
    assert memory.observe(told(p=(A, B), again=(A, B))) == {}
    assert memory.labels == {"a": A.label, "b": B.label}


def test_nobody_is_left_for_a_while() -> None:
    memory = AdapterMemory()
    memory.observe(told(d=(A,)))
    assert memory.observe([]) == {}
    assert memory.observe(told(again=())) == {D_AGAIN: [A]}


def test_what_was_unloaded_does_not_come_back() -> None:
    """Seen at the workers, by another router's order, or ordered here."""
    for is_ordered_here in (False, True):
        memory = AdapterMemory()
        memory.observe(told(p=(A, B), d=(A, B)))
        if is_ordered_here:
            assert memory.forget("a")
            assert not memory.forget("a")
        else:
            memory.observe(told(p=(B, replace(A, retired=True)), d=(A, B)))
        assert memory.observe(told(p=(B,), again=(), d=(A, B))) == {D_AGAIN: [B]}
        assert not memory.wants(A.label)
        memory.observe(told(p=(B,), again=(B,)))
        memory.observe(told(p=(A, B), again=(B,)))
        assert memory.wants(A.label), "the same load, ordered anew"


def test_a_newer_load_counts_and_one_taken_back_does_not() -> None:
    memory = AdapterMemory()
    memory.observe(told(p=(A,), d=(A,)))
    assert memory.observe(told(p=(NEWER,), d=(A,))) == {D: [NEWER]}
    assert memory.observe(told(p=(NEWER,), d=(NEWER,))) == {}
    memory.observe(told(p=(A,), d=(A,)))
    assert memory.labels == {"a": A.label}
    assert memory.observe(told(p=(A,), again=())) == {D_AGAIN: [A]}


def test_a_workers_own_and_what_it_cannot_take() -> None:
    memory = AdapterMemory()
    assert memory.observe(told(p=(view("own", 0),), d=())) == {}
    assert memory.observe(told(p=(A,), again=())) == {D_AGAIN: [A]}
    memory.settle(D_AGAIN, A.label)
    assert memory.observe(told(p=(A,), again=())) == {}
    assert memory.observe(told(p=(A,), d=())) == {D: [A]}, "another process is asked again"


def test_each_worker_reads_it_where_it_did_before() -> None:
    memory = AdapterMemory()
    elsewhere = replace(A, path="/mnt/a")
    memory.observe(told(p=(A,), d=(elsewhere,)))
    assert memory.observe(told(p=(A,), again=())) == {D_AGAIN: [elsewhere]}
    (lacking,) = memory.observe([Told(("new", 1), ()), *told(p=(A,), again=(elsewhere,))]).values()
    assert [view.label for view in lacking] == [A.label]


def test_who_was_away_while_it_was_unloaded_does_not_get_it_again() -> None:
    """One router's connections to all workers break; the operator asks another one."""
    memory = AdapterMemory()
    memory.observe(told(p=(A, B), d=(A, B)))
    assert memory.observe([]) == {}
    assert memory.observe(told(p=(B,))) == {}
    assert memory.observe(told(p=(B,), d=(B,))) == {}
    assert memory.labels == {"b": B.label}
    assert memory.observe(told(p=(B,), again=())) == {D_AGAIN: [B]}


def test_a_load_under_way_is_no_news() -> None:
    memory = AdapterMemory()
    memory.observe(told(p=(A,), again=()))
    memory.give(D_AGAIN, A.label)
    assert memory.forget("a")
    memory.observe(told(p=(), again=(A,)))
    assert memory.is_over(A.label)


def test_a_load_under_way_is_no_news_when_a_newer_one_has_overtaken_it() -> None:
    memory = AdapterMemory()
    memory.observe(told(p=(A,), d=(), again=()))
    memory.give(D_AGAIN, A.label)
    memory.observe(told(p=(A,), d=(NEWER,), again=()))
    memory.observe(told(p=(NEWER,), d=(NEWER,), again=()))
    memory.observe(told(p=(NEWER,), d=(NEWER,), again=(A,)))
    assert memory.observe(told(p=(), d=(), again=(A,))) == {}, "it is being unloaded everywhere"
    assert memory.labels == {}


def test_what_was_given_comes_back_when_its_successor_is_taken_back() -> None:
    memory = AdapterMemory()
    memory.observe(told(p=(A,), d=()))
    for process in (P, D):
        memory.give(process, A.label)
        memory.settle(process, A.label)
    memory.observe(told(p=(A,), d=(A,)))
    memory.observe(told(p=(NEWER,), d=(NEWER,)))
    assert not memory.is_over(A.label), "a newer load is wanted in its place"
    memory.observe(told(p=(A,), d=(A,)))
    assert memory.labels == {"a": A.label}
    assert memory.is_over(NEWER.label)
    assert memory.observe(told(p=(A,), again=())) == {D_AGAIN: [A]}


def test_loads_that_are_over_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that lives through many of them and can take none: nothing grows with their number."""
    monkeypatch.setattr("router.adapter_memory._MOST_GONE", 3)
    memory, sizes = AdapterMemory(), set()
    for generation in range(1, 41):
        here = told(p=(view("a", generation),), d=())
        label = view("a", generation).label
        assert memory.observe(here) == {D: [view("a", generation)]}
        memory.give(D, label)
        memory.settle(D, label)
        memory.withdraw(D, label)
        memory.observe(told(p=(view("a", generation),), d=()))
        assert memory.observe(here) == {}, "it is settled as long as it is wanted"
        sizes.add((len(memory._settled), len(memory._given), len(memory._withdrawn)))
    assert sizes <= {(n, n, n) for n in range(1, 5)}
