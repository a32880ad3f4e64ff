"""What a tier holds: two-phase stores, readers, chains, eviction, pins; whatever the order, the books agree."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.events import CacheEvent
from kvstore.tier_block import Entry, Owned, TierBlock, owner_of
from kvstore.tier_book import TierBook

SIZE = 2


def _chain(name: str, length: int, salt: str = "") -> list[TierBlock]:
    keys = [f"{salt}{name}{i}".encode() for i in range(length)]
    return [TierBlock(key, keys[i - 1] if i else None, (i, i), owner_of(salt)) for i, key in enumerate(keys)]


def _tokens(chain: list[TierBlock]) -> list[int]:
    return [token for block in chain for token in block.token_ids]


def _store(book: TierBook, chain: list[TierBlock], now: float = 0.0) -> list[bool]:
    entries = []
    for block in chain:
        entry = book.begin_store(block, now)
        entries.append(entry is not None and book.finish_store(entry, 7))
    return entries


def _match(book: TierBook, chain: list[TierBlock], start: int = 0) -> list[Entry]:
    return book.match([block.key for block in chain], _tokens(chain), SIZE, start)


def test_a_block_is_found_only_when_it_is_whole() -> None:
    """CASES F12: a block whose put has not ended is not there, and is not an ancestor either."""
    book, chain = TierBook(4), _chain("a", 2)
    entry = book.begin_store(chain[0], 0.0)
    assert entry is not None
    assert not _match(book, chain)
    assert book.begin_store(chain[0], 0.0) is None
    assert book.begin_store(chain[1], 0.0) is None
    assert book.finish_store(entry, 5)
    assert [(found.slot, found.checksum) for found in _match(book, chain)] == [(entry.slot, 5)]
    assert book.take_events() == [CacheEvent("stored", (chain[0].key,), "host")]


def test_a_store_that_fails_leaves_nothing() -> None:
    book, chain = TierBook(1), _chain("a", 1)
    entry = book.begin_store(chain[0], 0.0)
    assert entry is not None
    book.cancel_store(entry)
    assert (book.num_free, book.take_events()) == (1, [])
    assert _store(book, chain) == [True]


def test_tails_are_evicted_first_and_of_the_chain_that_was_not_used() -> None:
    book, old, new = TierBook(4), _chain("a", 2), _chain("b", 2)
    _store(book, old)
    _store(book, new)
    book.release(_match(book, old))
    _store(book, _chain("c", 1))
    assert book.ready_keys() == [old[0].key, old[1].key, new[0].key, b"c0"]
    _store(book, _chain("d", 1))
    assert book.ready_keys() == [old[0].key, old[1].key, b"c0", b"d0"]


def test_what_is_read_is_not_evicted_nor_are_its_ancestors() -> None:
    book, chain = TierBook(2), _chain("a", 2)
    _store(book, chain)
    found = _match(book, chain, start=1)
    assert _store(book, _chain("b", 1)) == [False]
    book.release(found)
    assert _store(book, _chain("b", 1)) == [True]
    assert book.ready_keys() == [chain[0].key, b"b0"]


def test_a_parent_is_not_evicted_for_its_child() -> None:
    book, chain = TierBook(1), _chain("a", 2)
    assert _store(book, chain) == [True, False]
    assert book.ready_keys() == [chain[0].key]
    assert _store(book, _chain("b", 1)) == [True]


def test_a_slot_is_reused_only_when_its_last_reader_is_done() -> None:
    book, chain = TierBook(1), _chain("a", 1)
    _store(book, chain)
    found = _match(book, chain)
    assert [entry.slot for entry in book.forget(chain[0].key)] == [0]
    assert not _match(book, chain)
    assert _store(book, chain) == [False]
    book.release(found)
    assert _store(book, chain) == [True]


def test_clear_voids_what_is_being_written() -> None:
    book, chain = TierBook(2), _chain("a", 1)
    entry = book.begin_store(chain[0], 0.0)
    assert entry is not None
    book.clear()
    assert not book.finish_store(entry, 1)
    assert (book.num_free, book.take_events()) == (2, [CacheEvent("cleared", tier="host")])


def test_clear_of_one_tenant_leaves_the_others() -> None:
    """CASES D5: the salt is in every key, and a tenant's blocks go together."""
    book = TierBook(4)
    _store(book, _chain("x", 2, salt="a"))
    _store(book, _chain("x", 2, salt="b"))
    assert len(book.clear(Owned.by_tenant("a"))) == 2
    assert book.ready_keys() == [b"bx0", b"bx1"]


def test_an_adapters_blocks_go_together_whoever_asked_for_them() -> None:
    book = TierBook(8)
    owners = {b"a": ("s", "style"), b"b": ("", "style"), b"c": ("s", ""), b"d": ("style", "s"), b"e": ("", "")}
    for key, owner in owners.items():
        _store(book, [TierBlock(key, None, (1, 1), owner_of(*owner))])
    assert [entry.block.key for entry in book.clear(Owned.by_adapter("style"))] == [b"a", b"b"]
    assert [entry.block.key for entry in book.clear(Owned.by_tenant("s"))] == [b"c"]
    assert [entry.block.key for entry in book.clear(Owned.by_tenant(""))] == [b"e"]
    assert book.ready_keys() == [b"d"]


def test_other_tokens_under_the_same_key_are_no_hit() -> None:
    book, chain = TierBook(2), _chain("a", 1)
    _store(book, chain)
    assert not book.match([chain[0].key], [9, 9], SIZE)


def test_pins_keep_a_chain_until_their_time() -> None:
    book, chain = TierBook(2), _chain("a", 2)
    _store(book, chain)
    assert book.pin([block.key for block in _chain("a", 5)], until=10.0) == 2
    assert _store(book, _chain("b", 1), now=9.0) == [False]
    assert book.num_pinned(9.0) == 2
    book.unpin([chain[1].key])
    assert book.num_pinned(9.0) == 1
    assert book.pin([block.key for block in chain], until=10.0) == 2
    assert book.num_pinned(9.0) == 2
    assert _store(book, _chain("b", 1), now=10.0) == [True]
    assert book.ready_keys() == [chain[0].key, b"b0"]


def test_a_tier_that_gets_no_more_room_goes_on_with_what_it_has() -> None:
    book = TierBook(4)
    _store(book, _chain("a", 2))
    entry = book.begin_store(_chain("b", 1)[0], 0.0)
    assert entry is not None
    book.cancel_store(entry)
    book.shrink(entry.slot)
    assert book.num_free == 0
    assert _store(book, _chain("b", 1)) == [True]
    assert book.ready_keys() == [b"a0", b"b0"]
    book.check_integrity()


def test_restoring_needs_a_parent_and_a_free_slot() -> None:
    book, chain = TierBook(3), _chain("a", 3)
    assert not book.restore(chain[1], 1, 7)
    assert book.restore(chain[0], 2, 7)
    assert not book.restore(chain[1], 2, 7)
    assert book.restore(chain[1], 0, 7)
    assert [entry.slot for entry in _match(book, chain)] == [2, 0]


class _Machine(RuleBasedStateMachine):
    """Random stores, reads and losses on a small tier; a plain model says what must be found at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self.book = TierBook(5)
        self.writing: list[Entry] = []
        self.reading: list[list[Entry]] = []
        self.listed: set[bytes] = set()
        self.now = 0.0
        self.pinned: dict[bytes, float] = {}

    chains = st.tuples(st.sampled_from("ab"), st.sampled_from(["", "s"]))

    def _chain(self, name: tuple[str, str]) -> list[TierBlock]:
        return _chain(name[0], 4, name[1])

    @rule(name=chains, at=st.integers(0, 3))
    def begin(self, name: tuple[str, str], at: int) -> None:
        block = self._chain(name)[at]
        entry = self.book.begin_store(block, self.now)
        if entry is not None:
            assert block.parent is None or self.book.holds(block.parent)
            self.writing.append(entry)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), succeeds=st.booleans())
    def end(self, data: st.DataObject, succeeds: bool) -> None:
        entry = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        if succeeds:
            assert self.book.finish_store(entry, 1) == self.book.holds(entry.block.key)
        else:
            self.book.cancel_store(entry)

    @rule(name=chains, start=st.integers(0, 3))
    def read(self, name: tuple[str, str], start: int) -> None:
        chain = self._chain(name)
        found = _match(self.book, chain, start)
        assert [entry.block for entry in found] == chain[start : start + len(found)]
        self.reading.append(found)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        self.book.release(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    @rule(name=chains, at=st.integers(0, 3))
    def forget(self, name: tuple[str, str], at: int) -> None:
        key = self._chain(name)[at].key
        self.book.forget(key)
        assert not self.book.holds(key)

    @rule(salt=st.sampled_from([None, "", "s"]))
    def clear(self, salt: str | None) -> None:
        self.book.clear(None if salt is None else Owned.by_tenant(salt))
        left = {key.startswith(b"s") for key in self.book.ready_keys()}  # True: of tenant "s"
        assert not left if salt is None else (salt == "s") not in left

    @rule(name=chains, seconds=st.integers(1, 3))
    def pin(self, name: tuple[str, str], seconds: int) -> None:
        self.book.pin([block.key for block in self._chain(name)], self.now + seconds)

    @rule(name=chains, num_blocks=st.integers(1, 4))
    def unpin(self, name: tuple[str, str], num_blocks: int) -> None:
        self.book.unpin([block.key for block in self._chain(name)[:num_blocks]])

    @rule()
    def count_pins(self) -> None:
        expected = sum(entry.pinned_until > self.now for entry in self.book._entries.values())
        assert self.book.num_pinned(self.now) == expected

    @rule()
    def tick(self) -> None:
        self.now += 1.0

    @invariant()
    def the_books_agree(self) -> None:
        self.book.check_integrity()
        assert self.book.num_busy <= len(self.writing) + sum(map(len, self.reading))
        held = {id(entry): entry.slot for entry in (*self.writing, *(e for found in self.reading for e in found))}
        assert len(set(held.values())) == len(held), "two blocks share a slot that somebody has"
        for event in self.book.take_events():
            if event.kind == "cleared":
                self.listed.clear()
            elif event.kind == "stored":
                self.listed |= set(event.keys)
            else:
                assert set(event.keys) <= self.listed
                self.listed -= set(event.keys)
        assert self.listed == set(self.book.ready_keys())

    def teardown(self) -> None:
        for entry in self.writing:
            self.book.cancel_store(entry)
        for found in self.reading:
            self.book.release(found)
        self.book.clear()
        assert (self.book.num_free, self.book.num_busy) == (5, 0)


TestTierBook: Any = _Machine.TestCase
TestTierBook.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_releasing_what_nobody_reads_is_an_error() -> None:
    book, chain = TierBook(1), _chain("a", 1)
    _store(book, chain)
    found = _match(book, chain)
    book.release(found)
    with pytest.raises(ValueError, match="slot 0 is released but nobody reads it"):
        book.release(found)
