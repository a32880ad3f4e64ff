"""Which leaf a tier evicts: always one that is worth least, by an oracle that looks at all of them."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction_order import MAX_PRICED
from kvstore.tier_block import Entry, TierBlock
from kvstore.tier_book import TierBook

SLOTS = 5


def _block(chain: str, depth: int) -> TierBlock:
    return TierBlock(f"{chain}{depth}".encode(), f"{chain}{depth - 1}".encode() if depth else None, (depth,))


def _store(book: TierBook, block: TierBlock) -> bool:
    entry = book.begin_store(block, 0.0)
    return entry is not None and book.finish_store(entry, 1)


def _keys(chain: str, length: int) -> list[bytes]:
    return [_block(chain, depth).key for depth in range(length)]


@dataclass
class _Known:
    age: float
    stamp: int
    num_uses: int


class _Oracle:
    """The same by looking at every block each time."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs = costs
        self.blocks: dict[bytes, _Known] = {}
        self.age, self.now = 0.0, 0

    def cost(self, key: bytes, num_uses: int) -> float:
        return self.costs[chr(key[0])] * num_uses

    def touch(self, key: bytes) -> None:
        self.now += 1
        num_uses = self.blocks[key].num_uses if key in self.blocks else 0
        self.blocks[key] = _Known(self.age, self.now, num_uses + 1)

    def store(self, block: TierBlock) -> bool:
        if block.key in self.blocks or (block.parent is not None and block.parent not in self.blocks):
            return False
        if len(self.blocks) == SLOTS and not self.evict(block.parent):
            return False
        self.touch(block.key)
        return True

    def evict(self, but: bytes | None) -> bool:
        leaves = [key for key in self.blocks if key != but and b"%c%d" % (key[0], int(key[1:]) + 1) not in self.blocks]
        if not leaves:
            return False
        values = {key: self.blocks[key].age + self.cost(key, self.blocks[key].num_uses) for key in leaves}
        worst = min(leaves, key=lambda key: (values[key], self.blocks[key].stamp))
        gone = self.blocks.pop(worst)
        self.age = max(self.age, values[worst])
        parent = self.blocks.get(b"%c%d" % (worst[0], int(worst[1:]) - 1))
        if parent is not None and parent.stamp < gone.stamp:
            parent.age, parent.stamp = gone.age, gone.stamp
        return True


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["store", "touch"]), st.sampled_from("abc"), st.integers(0, 3)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.lists(st.sampled_from([0.0, 1.0, 1.5, 8.0]), min_size=3, max_size=3))
def test_the_leaf_of_least_value_goes(operations: list[tuple[str, str, int]], costs: list[float]) -> None:
    oracle = _Oracle(dict(zip("abc", costs, strict=True)))
    book = TierBook(SLOTS, lambda entry: oracle.cost(entry.block.key, entry.num_uses))
    for operation, chain, depth in operations:
        if operation == "store":
            assert _store(book, _block(chain, depth)) == oracle.store(_block(chain, depth))
        else:
            for key in _keys(chain, depth + 1):
                if key in oracle.blocks:
                    oracle.touch(key)
            book.touch(_keys(chain, depth + 1))
        book.check_integrity()
        assert set(book.ready_keys()) == set(oracle.blocks)
        for key in oracle.blocks:  # prefix-closed
            assert key.endswith(b"0") or b"%c%d" % (key[0], int(key[1:]) - 1) in oracle.blocks


@settings(max_examples=50, deadline=None)
@given(OPERATIONS)
def test_with_one_cost_for_all_it_is_lru(operations: list[tuple[str, str, int]]) -> None:
    book, order = TierBook(SLOTS), list[bytes]()
    for operation, chain, depth in operations:
        if operation == "store":
            before = set(book.ready_keys())
            if _store(book, _block(chain, depth)):
                order.append(_block(chain, depth).key)
            for gone in before - set(book.ready_keys()):
                leaves = [key for key in order if b"%c%d" % (key[0], int(key[1:]) + 1) not in order]
                assert gone == leaves[0]
                order.remove(gone)
        else:
            keys = [key for key in _keys(chain, 4) if book.holds(key)]  # whole chains, so that parents come along
            book.touch(keys)
            for key in keys:
                order.remove(key)
            order += reversed(keys)


def test_a_dear_block_stays_unused_for_longer_but_not_for_ever() -> None:
    costs = {b"a0": 3.0}
    book = TierBook(2, lambda entry: costs.get(entry.block.key, 1.0))
    _store(book, _block("a", 0))
    survived = 0
    while book.holds(b"a0") and survived < 100:
        _store(book, TierBlock(b"x%d" % survived, None, (0,)))
        survived += 1
    assert survived == 4  # the first finds a free slot


def test_a_price_that_has_risen_counts_when_its_turn_comes() -> None:
    """The slower tier that had the block too has lost it meanwhile."""
    below = {b"a0", b"b0"}
    book = TierBook(2, lambda entry: 0.1 if entry.block.key in below else 1.0)
    _store(book, _block("a", 0))
    _store(book, _block("b", 0))
    below.discard(b"a0")
    _store(book, _block("c", 0))
    assert (book.holds(b"a0"), book.holds(b"b0")) == (True, False)


def test_a_price_that_has_fallen_is_seen_before_the_block_is_the_cheapest() -> None:
    """The slower tier gets a block after the faster one has booked it."""
    below: set[bytes] = set()
    book = TierBook(8, lambda entry: 0.1 if entry.block.key in below else 1.0 + 0.01 * entry.stamp)
    for number in range(8):
        _store(book, TierBlock(b"a%d" % number, None, (0,)))
    below.add(b"a7")
    for number in range(4):
        _store(book, TierBlock(b"b%d" % number, None, (0,)))
    assert not book.holds(b"a7")


def test_the_prices_asked_for_a_store_are_few_whatever_has_changed() -> None:
    """The first eviction of a full tier, when all have become dearer, and when all are used."""
    num_asked, factor = 0, 1.0

    def cost(entry: Entry) -> float:
        nonlocal num_asked
        num_asked += 1
        return factor * entry.num_uses

    book = TierBook(1000, cost)
    most = 0
    for number in range(3000):
        if number == 2000:
            factor = 3.0
        if number == 2500:
            book.touch(book.ready_keys())
        num_asked = 0
        assert _store(book, TierBlock(b"%d" % number, None, (0,)))
        most = max(most, num_asked)
    book.check_integrity()
    assert 0 < most <= MAX_PRICED + 1


def test_of_those_that_have_become_dearer_the_best_goes() -> None:
    """An eviction prices no more than a few; the cheapest of them goes."""
    dear: dict[bytes, float] = {}
    book = TierBook(100, lambda entry: dear.get(entry.block.key, 1.0))
    for number in range(100):
        _store(book, TierBlock(b"%d" % number, None, (0,)))
    dear |= {b"%d" % number: 9.0 - number for number in range(4)}
    dear |= {b"%d" % number: 50.0 for number in range(4, 100)}
    assert _store(book, TierBlock(b"new", None, (0,)))
    assert not book.holds(b"3")
    book.check_integrity()


def test_books_of_forgotten_blocks_are_not_kept() -> None:
    """Clearing and pinning again and again leaves neither leaves nor pins."""
    book = TierBook(1000)
    for number in range(200):
        keys = [b"%d/%d" % (number, at) for at in range(50)]
        for key in keys:
            _store(book, TierBlock(key, None, (0,)))
            book.pin([key], 1e9)
        book.check_integrity()
        book.clear()
        assert (len(book._order), len(book._pins)) == (0, 0)
    _store(book, _block("a", 0))
    for until in range(1, 1000):
        book.pin([b"a0"], float(until))
        book.check_integrity()
    _store(book, TierBlock(b"b", None, (0,)))
    assert book.begin_store(TierBlock(b"c", None, (0,)), 998.5) is not None
    assert book.num_pinned(998.5) == 1
    book.begin_store(TierBlock(b"d", None, (0,)), 999.0)
    assert book.num_pinned(998.5) == 0
    book.check_integrity()
