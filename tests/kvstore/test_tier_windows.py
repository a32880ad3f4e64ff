"""A tier's book with several KV groups: what it holds, and which blocks of windows go first."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.kv_groups import KvGroup, KvGroups
from kvstore.tier_block import Entry, TierBlock
from kvstore.tier_book import TierBook
from kvstore.tier_chain import Place, TierChain

CHAIN = TierChain(KvGroups((KvGroup((0,)), KvGroup((1,)), KvGroup((2,), 9), KvGroup((3,), 5)), 4, 16))
"""Two groups that keep everything; of the others a hit needs two blocks and one."""


def key(chain: str, number: int) -> bytes:
    """Chains "a" and "b" share their first two blocks, as "ab" does with both."""
    return f"{'a' if number < 2 else chain}{number}".encode().ljust(32, b"\0")


def block(chain: str, number: int, group: int) -> TierBlock:
    before = key(chain, number - 1) if number else None
    own = key(chain, number)
    return TierBlock(CHAIN.name(own, group), CHAIN.parent(own, before, group), (number,) * 4, group=group)


def store(book: TierBook, chain: str, number: int, group: int) -> Entry | None:
    entry = book.begin_store(block(chain, number, group), 0.0)
    if entry is not None:
        assert book.finish_store(entry, 1)
    return entry


def fill(book: TierBook, chain: str, num_blocks: int) -> None:
    for number in range(num_blocks):
        for group in range(4):
            store(book, chain, number, group)


def held(book: TierBook, chain: str, group: int, num_blocks: int = 8) -> list[int]:
    return [i for i in range(num_blocks) if book.holds(CHAIN.name(key(chain, i), group))]


def test_names_and_parents() -> None:
    assert CHAIN.name(b"k" * 32, 0) == b"k" * 32
    assert len({CHAIN.name(b"k" * 32, group) for group in range(256)}) == 256
    assert CHAIN.name(CHAIN.name(b"k" * 32, 3), 3) == b"k" * 32
    assert block("a", 0, 0).parent is None
    assert block("a", 3, 0).parent == CHAIN.name(key("a", 2), 1)
    assert block("a", 3, 1).parent == key("a", 3)
    assert block("a", 3, 2).parent == block("a", 3, 3).parent == CHAIN.name(key("a", 3), 1)
    assert CHAIN.of_hit(2) == [*CHAIN.prefix(0, 2), Place(0, 2), Place(1, 2), Place(1, 3)]
    assert CHAIN.num_windows(9) == len(CHAIN.windows(9)) == 3
    with pytest.raises(ValueError, match="tiers need a KV group that keeps everything"):
        TierChain(KvGroups((KvGroup((0,), 8),), 4, 16))


def test_only_group_0_is_told_to_the_index() -> None:
    book = TierBook(40, chain=CHAIN)
    fill(book, "a", 3)
    (event,) = book.take_events()
    assert (event.kind, event.keys) == ("stored", tuple(key("a", i) for i in range(3)))
    assert book.ready_keys() == list(event.keys)
    assert book.num_ready == 12
    book.forget(key("a", 1))
    assert [event.keys for event in book.take_events()] == [(key("a", 2), key("a", 1))]
    assert book.num_ready == 4


def test_windows_go_from_the_front() -> None:
    """The last window is whole as long as it can be; group 0 loses its end only when nothing hangs on it."""
    book = TierBook(24, chain=CHAIN)
    fill(book, "a", 6)
    for at in range(5):
        assert book.begin_store(TierBlock(b"x%d" % at, None, (0,)), 0.0) is not None
    assert held(book, "a", 0) == held(book, "a", 1) == list(range(6))
    assert (held(book, "a", 2), held(book, "a", 3)) == ([3, 4, 5], [2, 3, 4, 5])
    book.check_integrity()


def test_what_no_window_needs_goes_first() -> None:
    """Block 2 of a chain whose windows have two blocks, without its neighbours."""
    book = TierBook(24, chain=CHAIN)
    fill(book, "a", 6)
    book.touch([CHAIN.name(key("a", 2), 2)])  # just used, and still
    for number in (1, 3):
        book.forget(CHAIN.name(key("a", number), 2))
    for at in range(3):
        assert book.begin_store(TierBlock(b"x%d" % at, None, (0,)), 0.0) is not None
    assert held(book, "a", 2) == [0, 4, 5]
    book.check_integrity()


def test_a_chain_that_ends_between_two_full_groups_may_go_on() -> None:
    """Another that goes on from the same block without its window does not make the block useless."""
    book = TierBook(40, chain=CHAIN)
    fill(book, "a", 4)
    for number in (0, 2):
        book.forget(CHAIN.name(key("a", number), 2))
    block_1 = book._entries[CHAIN.name(key("a", 1), 2)]
    assert book._windows.is_torn(block_1)
    assert store(book, "b", 2, 0) is not None
    assert not book._windows.is_torn(block_1)


@pytest.mark.parametrize("num_chats", [10, 5000])
def test_a_beginning_that_all_chats_share_costs_no_more(num_chats: int) -> None:
    """Thousands of blocks follow its last one: an eviction, or a look at it, doesn't look at all of them."""
    chain = TierChain(KvGroups((KvGroup((0,)), KvGroup((1,), 9)), 4, 16))
    book = TierBook(3 * num_chats, chain=chain)
    entries: list[Entry] = []
    for number in range(1 + num_chats):
        own, before = number.to_bytes(31) + b"\0", bytes(32) if number else None
        for group in (0, 1):
            name = chain.name(own, group)
            entry = book.begin_store(TierBlock(name, chain.parent(own, before, group), (0,) * 4, group=group), 0.0)
            assert entry is not None
            assert book.finish_store(entry, 1)
            entries.append(entry)
    shared = entries[1]
    assert len(book._windows.neighbours(shared)) <= 64
    assert not book._windows.is_torn(shared)
    looked_at = 0
    entries_of = book._windows._entries

    class Counted(dict[bytes, Entry]):
        def get(self, *args: Any) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().get(*args)

        def __getitem__(self, name: bytes) -> Entry:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(name)

    book._windows._entries = Counted(entries_of)
    shared.depth = 7  # as if more of its window had come before it
    book._windows.is_torn(shared)
    book._windows.neighbours(shared)
    assert looked_at < 2000


class _Machine(RuleBasedStateMachine):
    """Random stores, losses and hits. What is torn is compared with a plain search; nothing else than the ends of the
    full groups' chain and blocks of windows is ever evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.book = TierBook(22, chain=CHAIN)
        self.reading: list[Entry] = []

    places = st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 3))

    @rule(place=places)
    def store(self, place: tuple[str, int, int]) -> None:
        store(self.book, *place)

    @rule(chain=st.sampled_from("ab"), end=st.integers(1, 6))
    def compute(self, chain: str, end: int) -> None:
        fill(self.book, chain, end)

    @rule(place=places)
    def forget(self, place: tuple[str, int, int]) -> None:
        self.book.forget(block(*place).key)

    @rule(chain=st.sampled_from("ab"), depth=st.integers(1, 6))
    def hit(self, chain: str, depth: int) -> None:
        keys = [key(chain, number) for number in range(6)]
        self.book.touch(CHAIN.names(keys, CHAIN.of_hit(depth)))

    @rule(place=places)
    def read(self, place: tuple[str, int, int]) -> None:
        self.book.release(self.reading)
        self.reading = self.book.match([block(*place).key], (place[1],) * 4, 4)

    @invariant()
    def the_books_agree(self) -> None:
        self.book.check_integrity()
        for chain in "ab":
            full = [held(self.book, chain, group) for group in (0, 1)]
            assert full[0] in (full[1], [*full[1], len(full[1])])
            assert full[0] == list(range(len(full[0])))
            for group in (2, 3):
                assert set(held(self.book, chain, group)) <= set(full[1]), "a window's block without what it hangs on"

    @invariant()
    def torn_is_what_no_hit_can_use(self) -> None:
        for group in (2, 3):
            usable: dict[bytes, bool] = {}
            goes_on = {chain: len(held(self.book, chain, 0)) > 2 for chain in "ab"}
            for chain in "ab":
                if goes_on["a" if chain == "b" else "b"] and not goes_on[chain]:
                    continue  # only the other one is there
                there, end = held(self.book, chain, group), len(held(self.book, chain, 1))
                for number in there:
                    name = CHAIN.name(key(chain, number), group)
                    usable[name] = usable.get(name, False) or _is_usable(number, group, set(there), end)
            for name, is_usable in usable.items():
                assert self.book._windows.is_torn(self.book._entries[name]) == (not is_usable)


def _is_usable(number: int, group: int, there: set[int], end: int) -> bool:
    """Whether a hit that ends behind it can have its window, if the chain goes on as it may."""
    for depth in range(number + 1, number + 1 + CHAIN.window_blocks(group)):
        window = range(CHAIN.groups.first_block(group, 4 * depth), depth)
        if all(i in there or i >= end for i in window):
            return True
    return False


TestTierWindows: Any = _Machine.TestCase
TestTierWindows.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
