"""The rules of the view without a server: continuation, snapshots, losses, and what they lead to."""

from dataclasses import replace
from random import Random

import pytest

from kvstore.index_view import IndexView
from kvstore.redis_keys import BlockEvent, RedisKeys, split_keys
from kvstore.registry import ModelRecord, WorkerRecord

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")
RECORD = WorkerRecord("w", "127.0.0.1:1", "prefill", incarnation=7, generation=1, seq=3, capacity=8, block_size=4)


def event(seq: int, *stored: bytes, **changes: object) -> BlockEvent:
    return BlockEvent("w", 7, 1, seq, stored=stored)._replace(**changes)  # type: ignore[arg-type]


def view_with(*blocks: bytes) -> IndexView:
    view = IndexView()
    assert view.expect_read(["w"]) == ["w"]
    read(view, RECORD, *blocks, as_of=b"10-0")
    return view


def read(view: IndexView, record: WorkerRecord | None, *blocks: bytes, as_of: bytes) -> list[str]:
    if record is not None:
        view.begin_snapshot(record)
        view.memory.store(record.worker_id, blocks)
    return view.finish_read("w", record, as_of)


def test_the_next_event_is_applied_in_the_order_cleared_removed_stored() -> None:
    view = view_with(A, B)
    assert view.apply(b"11-0", event(4, C, removed=(B,))) == []
    assert view.memory.blocks("w") == {A, C}
    assert view.apply(b"12-0", event(5, A, D, cleared=True)) == []
    assert view.memory.blocks("w") == {A, D}
    assert view.position("w") == (7, 1, 5)


def test_events_up_to_the_snapshot_are_skipped() -> None:
    view = view_with(A)
    assert view.apply(b"9-0", event(2, B)) == []
    assert view.apply(b"10-0", event(3, C)) == []
    assert view.apply(b"9-9", event(9, incarnation=1)) == []
    assert view.memory.blocks("w") == {A}


@pytest.mark.parametrize(
    ("later", "blocks_left"),
    [
        (event(5, B), {A}),  # a gap
        (event(3, B), {A}),  # backward
        (event(4, B, generation=2), {A}),  # the beginning of a generation was missed
        (event(1, B, incarnation=8), set()),  # what the old process said is void at once
        (event(1, kind="registered", cleared=True, incarnation=8), set()),
        (event(5, kind="deregistered", cleared=True, incarnation=8), set()),
    ],
)
def test_what_does_not_continue_has_the_worker_read_again(later: BlockEvent, blocks_left: set[bytes]) -> None:
    view = view_with(A)
    assert view.apply(b"11-0", later) == ["w"]
    assert view.is_reading
    assert view.memory.blocks("w") == blocks_left
    assert view.apply(b"12-0", event(6, D)) == []  # waits
    assert view.memory.blocks("w") == blocks_left
    assert read(view, replace(RECORD, seq=5), A, B, as_of=b"11-0") == []
    assert view.memory.blocks("w") == {A, B, D}
    assert not view.is_reading


def test_a_new_generation_begins_empty_and_needs_no_read() -> None:
    view = view_with(A, B)
    assert view.apply(b"11-0", event(1, generation=2, kind="registered", cleared=True)) == []
    assert view.apply(b"12-0", event(2, C, generation=2)) == []
    assert view.memory.blocks("w") == {C}
    assert view.num_reads == 1


def test_a_gap_among_the_waiting_is_found_too() -> None:
    view = view_with(A)
    assert view.apply(b"11-0", event(7)) == ["w"]
    assert view.apply(b"12-0", event(8, C)) == []
    assert view.apply(b"14-0", event(10, D)) == []
    assert read(view, replace(RECORD, seq=7), A, as_of=b"11-0") == ["w"]
    assert read(view, replace(RECORD, seq=9), A, C, as_of=b"13-0") == []
    assert view.memory.blocks("w") == {A, C, D}


def test_deregistering_and_coming_back() -> None:
    view = view_with(A)
    version = view.version
    assert view.apply(b"11-0", event(4, kind="deregistered", cleared=True)) == []
    assert dict(view.memory.workers()) == {}
    assert view.version == version + 1
    assert view.apply(b"12-0", event(4, kind="deregistered")) == []
    assert view.apply(b"13-0", event(1, kind="registered", incarnation=9)) == ["w"]
    assert read(view, replace(RECORD, incarnation=9, seq=1), as_of=b"13-0") == []
    assert view.memory.workers()["w"].incarnation == 9


def test_a_read_that_finds_nothing_or_breaks_off() -> None:
    view = view_with(A)
    view.expect_read(["w"])
    assert read(view, None, as_of=b"20-0") == []
    assert not view.memory.workers()
    view.expect_read(["w"])
    view.begin_snapshot(RECORD)
    view.memory.store("w", [A])
    view.restart()  # the connection broke before the rest came
    assert view.reconcile({"w": RECORD.position}) == []
    assert view.reconcile({"w": RECORD.position}) == ["w"]


def test_reconcile_waits_for_what_is_on_its_way_and_finds_what_is_not() -> None:
    view = view_with(A)
    assert view.reconcile({"w": (7, 1, 3)}) == []
    assert view.reconcile({"w": (7, 1, 5)}) == []  # two events are on their way
    view.apply(b"11-0", event(4))
    view.apply(b"12-0", event(5))
    assert view.reconcile({"w": (7, 1, 6)}) == []  # and one more
    assert view.reconcile({"w": (7, 1, 6)}) == ["w"]  # it never came
    assert view.reconcile({"w": (7, 1, 6)}) == []  # is being read
    read(view, replace(RECORD, seq=6), A, as_of=b"12-0")
    assert view.reconcile({"w": (7, 1, 2)}) == []  # Redis is behind: it lost writes, or we looked too early
    assert view.reconcile({"w": (7, 1, 2)}) == ["w"]
    read(view, replace(RECORD, seq=2), as_of=b"5-0")
    assert view.reconcile({"w": (8, 1, 1)}) == []
    assert view.reconcile({"w": (8, 1, 1)}) == ["w"]
    read(view, replace(RECORD, incarnation=8, seq=1), as_of=b"13-0")
    assert view.reconcile({"other": (1, 1, 1)}) == ["other"]
    assert not view.memory.workers()  # w has no lease any more


def test_any_loss_heals_by_reconciling() -> None:
    """Events lost at random; after two comparisons and the reads they ask for, the view is exact."""
    for seed in range(50):
        rng = Random(seed)
        view, held, seq = view_with(), set[bytes](), 3
        for step in range(40):
            key = bytes([rng.randrange(20)]) * 16
            stored, removed = ((), (key,)) if key in held else ((key,), ())
            held, seq = held.symmetric_difference({key}), seq + 1
            if rng.random() < 0.8:
                asked = view.apply(b"%d-0" % (100 + step), event(seq, *stored, removed=removed))
                if asked and rng.random() < 0.5:
                    read(view, replace(RECORD, seq=seq), *held, as_of=b"%d-0" % (100 + step))
        for _ in range(2):
            view.reconcile({"w": (7, 1, seq)})
            if view.is_reading:
                read(view, replace(RECORD, seq=seq), *held, as_of=b"1000-0")
        assert view.memory.blocks("w") == held
        view.memory.check_integrity()


# --- encodings ---


def test_c9_events_say_everything_about_themselves() -> None:
    full = BlockEvent("w", 2**64 - 1, 3, 4, "registered", True, (A,), (B, C), group=1, tier="host")
    fields = {
        name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in full.to_fields().items()
    }
    assert set(fields) == {
        b"worker", b"incarnation", b"generation", b"seq", b"group", b"tier", b"registered", b"cleared", b"removed",
        b"stored",
    }  # fmt: skip
    assert BlockEvent.from_fields(fields) == full
    for name in (b"worker", b"incarnation", b"generation", b"seq", b"group", b"tier"):
        with pytest.raises(ValueError, match=f"lacks the field b'{name.decode()}'"):
            BlockEvent.from_fields({each: value for each, value in fields.items() if each != name})
    with pytest.raises(ValueError, match="17 bytes are no whole number of 16-byte keys"):
        split_keys(b"x" * 17)


@pytest.mark.parametrize(
    "event",
    [
        BlockEvent("w", 2**64 - 1, 3, 4, removed=(A,), stored=(B, C), group=1, tier="host"),
        BlockEvent("w", 7, 3, 4, stored=(B, C)),
        BlockEvent("w", 7, 3, 4, removed=(B, C)),
        BlockEvent("w", 7, 3, 4, cleared=True, stored=(A,)),
        BlockEvent("w", 7, 3, 4, "registered", cleared=True),
        BlockEvent("w", 7, 3, 4, "deregistered", True, (A,), (B,)),
    ],
)
def test_an_entry_of_the_stream_says_the_same_in_any_order(event: BlockEvent) -> None:
    fields = [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in event.to_fields().items()
    ]
    for order in (fields, fields[::-1], [*fields, (b"later", b"x")]):
        assert BlockEvent.from_pairs([part for field in order for part in field]) == event
    with pytest.raises(ValueError, match="lacks the field"):
        BlockEvent.from_pairs([part for field in fields[1:] for part in field])
    with pytest.raises(ValueError, match="shorter"):
        BlockEvent.from_pairs([part for field in fields for part in field][:-1])


def test_names_of_one_model_share_a_hash_tag() -> None:
    names = RedisKeys(bytes(range(32)))
    tag = "pw:{000102030405060708090a0b0c0d0e0f}:"
    assert names.worker("w") == f"{tag}worker:w"
    assert names.blocks("w", 7) == f"{tag}blocks:w:7"
    assert (names.events, names.workers) == (f"{tag}events", f"{tag}workers")


def test_records_survive_redis() -> None:
    record = replace(RECORD, root=b"\x00" * 32, layout_id="bm", numerics_class="f32", block_bytes=(10, 20))
    fields = {name.encode(): value.encode() for name, value in record.to_hash().items()}
    assert WorkerRecord.from_hash("w", fields) == record
    with pytest.raises(ValueError, match="worker 'w' has a registry entry that cannot be read"):
        WorkerRecord.from_hash("w", fields | {b"role": b"cook"})
    with pytest.raises(ValueError, match="worker 'w'"):
        WorkerRecord.from_hash("w", {b"seq": b"4"})
    model = ModelRecord("m", b"\x01" * 32, "digest", 256, 16, 300)
    assert ModelRecord.from_json("m", model.to_json()) == model
    with pytest.raises(ValueError, match="model 'm' has an entry in pw:models that cannot be read"):
        ModelRecord.from_json("m", "{}")
