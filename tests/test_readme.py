"""The table of CASES.md's rows in README.md names tests that exist, and they name the row."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUMBERS = {"C": (1, 2, 4, 5, 7, 9, 10, 11, 12), "D": (1, 3, 4, 5, 6, 8), "F": (1, 4, 5, 6, 8, 9, 10, 12)}
"""Of CASES.md, but for D9: there are no media yet."""


def _table() -> Iterator[tuple[list[str], str]]:
    """Ids of rows, and the cell that says where their tests are."""
    for line in (TESTS / "README.md").read_text().splitlines():
        ids, _, cell = line.removeprefix("| ").partition(" | ")
        found = re.findall(r"\b[A-G]\d+\b", ids)
        if line.startswith("| ") and found:
            yield found, cell


def _named(cell: str) -> Iterator[tuple[Path, str]]:
    """Files or folders, and a test's name or nothing; what has no folder is in that of the one before."""
    path = TESTS
    for name in re.findall(r"`([^` ]+)`", cell):
        place, _, test = name.partition("::")
        if place.endswith((".py", "/")):
            near = path.parent / place
            path = TESTS / place if (TESTS / place).exists() or not near.exists() else near
        elif place:
            continue  # no file
        yield path, test


@pytest.mark.parametrize(
    ("ids", "cell"), list(_table()), ids=lambda each: "-".join(each) if isinstance(each, list) else ""
)
def test_what_the_table_names_is_there(ids: list[str], cell: str) -> None:
    for path, test in _named(cell):
        assert path.exists(), f"{ids}: {path}"
        if test:
            assert re.search(rf"def {test}\(", path.read_text()), f"{ids}: {path}::{test}"


@pytest.mark.parametrize("row", [f"{group}{number}" for group, numbers in NUMBERS.items() for number in numbers])
def test_a_test_says_which_row_it_is_for(row: str) -> None:
    paths = {path for ids, cell in _table() if row in ids for path, _ in _named(cell)}
    files = {file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])}
    name = rf"\b{row}\b|_{row.lower()}_"
    assert any(re.search(name, file.read_text()) for file in files), (
        f"{row}: none of {sorted(map(str, files))} names it"
    )
