"""Rows of what the parts of `run.sh` found, as CSV files and, last, as one table."""

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Result:
    """`value` is an error or a time; `against` its tolerance, floor or torch's time; `ratio` what is judged by."""

    part: str
    name: str
    shape: str
    value: str
    against: str
    ratio: str
    verdict: str


def write(path: Path, rows: Iterable[Result]) -> bool:
    """Writes each row as it comes, so that a part that is cut off leaves what it had. False if any row failed."""
    good = True
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Result)])
        for row in rows:
            writer.writerow(astuple(row))
            file.flush()
            print(*astuple(row), sep="  ", flush=True)
            good &= row.verdict != "WRONG"
    return good


def table(directory: Path) -> str:
    """All rows of the directory's CSV files, in columns."""
    rows = [tuple(field.name for field in fields(Result))]
    for path in sorted(directory.glob("*.csv")):
        with path.open(newline="") as file:
            rows += [tuple(line.values()) for line in csv.DictReader(file)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
