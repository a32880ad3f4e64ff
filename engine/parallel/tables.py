"""Block tables as the other ranks get them: of each row only what the step before has not told them already.

A row grows at its end, a table of a window also loses its beginning (`kernels.paged.PagedBatch.build` puts the first
block that is left there), rows come, go and change places. So a row is told as one of the last step's rows, how much of
its beginning now repeats one block, how much of the rest stays, and what follows: what is sent grows with the step's
new tokens, not with the context. Both sides keep the last step's rows; nothing else decides.

    row[first : kept] = before[source][first : kept]        row[kept : end] = new        row[: first] = row[first]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged import PagedBatch

Table = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableChanges:
    """One KV group's tables. `rows` int32 [sequences, 4]: source, first, kept, end; `new` int32: those of all rows."""

    rows: NDArray[np.int32]
    new: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchChanges:
    """A PagedBatch, its tables as changes, its other tensors as arrays: those are pickled in a tenth of the time."""

    cu_seqlens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_size: int
    tables: tuple[TableChanges, ...]
    slots: tuple[tuple[NDArray[Any], NDArray[Any]], ...]
    """Of each group: slot_blocks, slot_offsets."""


class TablesSender:
    """Rank 0's side. Every batch must reach every receiver, in this order."""

    def __init__(self) -> None:
        self._before: dict[int, list[Table]] = {}

    def changes(self, batch: PagedBatch) -> BatchChanges:
        """What the receivers don't know of it yet."""
        groups = (batch, *batch.others)
        ends = [-(-kv_len // batch.block_size) for kv_len in batch.kv_lens]
        tables = []
        for number, group in enumerate(groups):
            rows = [row[:end] for row, end in zip(group.block_tables.numpy(), ends, strict=True)]
            tables.append(_changes(self._before.get(number, []), rows))
            self._before[number] = rows
        slots = tuple((group.slot_blocks.numpy(), group.slot_offsets.numpy()) for group in groups)
        return BatchChanges(batch.cu_seqlens, batch.kv_lens, batch.block_size, tuple(tables), slots)


class TablesReceiver:
    """Another rank's side."""

    def __init__(self) -> None:
        self._before: dict[int, list[Table]] = {}

    def batch(self, changes: BatchChanges) -> PagedBatch:
        """The batch as the sender has it."""
        groups = []
        for number, (table, (blocks, offsets)) in enumerate(zip(changes.tables, changes.slots, strict=True)):
            rows = self._before[number] = _rows(self._before.get(number, []), table)
            width = max(map(len, rows), default=0)
            whole = np.zeros((len(rows), width), np.int64)
            for to, row in zip(whole, rows, strict=True):
                to[: len(row)] = row
            groups.append(
                PagedBatch(
                    changes.cu_seqlens,
                    changes.kv_lens,
                    torch.from_numpy(whole),
                    torch.from_numpy(blocks),
                    torch.from_numpy(offsets),
                    changes.block_size,
                )
            )
        first, *others = groups
        return replace(first, others=tuple(others)) if others else first


def _changes(before: Sequence[Table], rows: Sequence[Table]) -> TableChanges:
    by_last: dict[int, list[int]] = {}
    for number, row in enumerate(before):
        for block in {int(row[-1]), int(row[0])}:
            by_last.setdefault(block, []).append(number)
    told, new = [], []
    for number, row in enumerate(rows):
        first = num_repeated(row)
        source, kept = -1, first
        for candidate in _candidates(number, row, before, by_last):
            same = _num_same(before[candidate], row, first)
            if same > kept:
                source, kept = candidate, same
            if kept >= len(row) - 1:
                break
        told.append((source, first, kept, len(row)))
        new.append(row[kept:])
    flat = np.concatenate(new) if new else np.empty(0, np.int64)
    return TableChanges(np.array(told, np.int32).reshape(-1, 4), flat.astype(np.int32))


def _candidates(number: int, row: Table, before: Sequence[Table], by_last: dict[int, list[int]]) -> list[int]:
    """Rows of the step before that this one may go on from: the one in its place, and those with a block of its ends.

    Rows with a common prefix all begin alike, so those whose last block is near this one's end are looked at first.
    """
    found = [number] if number < len(before) else []
    for block in (*row[:-4:-1].tolist(), int(row[0])):
        found += by_last.get(int(block), [])
    return list(dict.fromkeys(found))[:_MOST_CANDIDATES]


_MOST_CANDIDATES = 8


def num_repeated(row: Table) -> int:
    """How many entries at the beginning stand for nothing: they repeat the one after them."""
    if len(row) < 2 or row[0] != row[1]:
        return 0
    others = np.flatnonzero(row != row[0])
    return (int(others[0]) if len(others) else len(row)) - 1


def _num_same(before: Table, row: Table, first: int) -> int:
    """Up to which entry the rows are the same from `first` on."""
    end = min(len(before), len(row))
    if end <= first:
        return first
    different = np.flatnonzero(before[first:end] != row[first:end])
    return first + int(different[0]) if len(different) else end


def _rows(before: Sequence[Table], changes: TableChanges) -> list[Table]:
    rows, at = [], 0
    for source, first, kept, end in changes.rows.tolist():
        row = np.empty(end, np.int64)
        if source >= 0:
            row[first:kept] = before[source][first:kept]
        row[kept:] = changes.new[at : at + end - kept]
        row[:first] = row[first]
        at += end - kept
        rows.append(row)
    return rows
