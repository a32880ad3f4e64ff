"""What the book says of blocks that change hands."""

import numpy as np
import pytest

from engine.draft.book import DraftBook


@pytest.fixture
def generations() -> np.ndarray:
    return np.ones(8, dtype=np.uint64)


def test_a_sequence_grows(generations: np.ndarray) -> None:
    book, table = DraftBook(4, generations), [5, 2, 7]
    assert book.num_filled(table) == 0
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 12)):
        book.fill(table, start, end)
        assert book.num_filled(table) == end
    assert book.num_filled([]) == 0
    assert book.num_filled([5, 2]) == 8
    assert book.num_filled([2, 5, 1]) == 8


def test_an_empty_range_changes_nothing(generations: np.ndarray) -> None:
    book, table = DraftBook(4, generations), [5, 2]
    for end in (3, 4):
        book.fill(table, 0, end)
        book.fill(table, end, end)
        assert book.num_filled(table) == end


def test_a_block_that_was_handed_out_anew_is_unfilled(generations: np.ndarray) -> None:
    book, table = DraftBook(4, generations), [5, 2, 7]
    book.fill(table, 0, 11)
    generations[2] += np.uint64(1)
    assert book.num_filled(table) == 4
    book.fill(table, 4, 6)
    assert book.num_filled(table) == 6
    book.fill(table, 6, 8)
    assert book.num_filled(table) == 11, "what lies behind the gap is still there"


def test_less_never_takes_back_more(generations: np.ndarray) -> None:
    book = DraftBook(4, generations)
    book.fill([1, 2], 0, 8)
    book.fill([3, 2], 0, 6)
    assert book.num_filled([1, 2]) == 8
