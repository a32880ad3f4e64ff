"""Questions about rows of logits, answered while the native kernels make them, or of whole rows (src/ops/looks.h)."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_TOP = 128
"""So many of the likeliest can be asked for."""
CONTENDERS = 256

Key = tuple[int, int, int, int]
"""Seed, position, choice, domain, as in engine/philox.py."""

KEY_FIELDS: list[Any] = [("seed", "u8"), ("position", "u4"), ("choice", "u4"), ("domain", "u4")]
_KEY = np.dtype(KEY_FIELDS, align=True)
_KEY_MASKS = (0xFFFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF, 0xFFFF_FFFF, 0xFFFF_FFFF)
LOOK = np.dtype(
    [
        *(("logits", "u8"), ("row", "i8"), ("num_top", "i8"), ("token", "i8"), ("temperature", "f8"), ("key", _KEY)),
        *(("wants_total", "i4"), ("is_broken", "i4"), ("num_found", "i8"), ("num_contenders", "i8"), ("rank", "i8")),
        *(("log_total", "f8"), ("top_ids", "i8", MOST_TOP), ("top_values", "f4", MOST_TOP)),
        ("contenders", "i8", CONTENDERS),
    ],
    align=True,
)

_QUESTION = struct.Struct("QqqqdQIII4xi")
"""The fields of LOOK that ask: up to `wants_total`. Packed at once they take a tenth of what numpy takes one by one."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is asked about a row: its `num_top` likeliest; who may win a draw at `temperature` (0: none) with `key`; its
    log-sum-exp; of whole rows the rank of `token`. Several may be about one row.
    """

    row: int
    num_top: int = 1
    temperature: float = 0.0
    key: Key = (0, 0, 0, 0)
    wants_total: bool = False
    token: int = -1


@dataclass(frozen=True, slots=True)
class Seen:
    """The answers. `contenders` ascend and hold whoever can be argmax(logit / T + noise), see `draws.Drawn`.

    None: more than there is room for.
    """

    is_broken: bool
    """There is a NaN: the rest means nothing."""
    top_ids: NDArray[np.int64]
    """The likeliest first, of equals the lowest id; fewer than asked for where the others are -inf."""
    top_values: NDArray[np.float32]
    contenders: NDArray[np.int64] | None
    log_total: float
    rank: int


class Looks:
    """A table of questions, as the kernels read it and answer into it."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self._table = np.empty(len(looks), dtype=LOOK)
        self._looks = looks
        room = self._table.view(np.uint8).data
        for i, look in enumerate(looks):
            asked = (look.row, look.num_top, look.token, look.temperature)
            key = (number & mask for number, mask in zip(look.key, _KEY_MASKS, strict=True))
            _QUESTION.pack_into(room, i * LOOK.itemsize, 0, *asked, *key, look.wants_total)

    def __len__(self) -> int:
        return len(self._looks)

    @property
    def address(self) -> int:
        return int(self._table.ctypes.data)

    def seen(self) -> list[Seen]:
        """The answers, once an op has run."""
        table = self._table
        columns = (table[name].tolist() for name in ("is_broken", "num_found", "num_contenders", "log_total", "rank"))
        return [
            Seen(
                bool(broken),
                table["top_ids"][i, :num],
                table["top_values"][i, :num],
                None if count < 0 else np.sort(table["contenders"][i, :count]),
                log_total,
                rank,
            )
            for i, (broken, num, count, log_total, rank) in enumerate(zip(*columns, strict=True))
        ]

    def run(self, ops: Any, rows: NDArray[np.float32], num_columns: int) -> list[Seen]:
        """About rows that are there: [R, at least num_columns], each row contiguous."""
        self._table["logits"] = rows.ctypes.data + self._table["row"].astype(np.uint64) * np.uint64(rows.strides[0])
        ops.row_looks(self.address, len(self), num_columns)
        return self.seen()


def keys_of(keys: Sequence[Key]) -> NDArray[Any]:
    """As the kernels read them; numbers that are too large lose their high bits, as everywhere."""
    table = np.empty(len(keys), dtype=_KEY)
    for index, ((name, _), mask) in enumerate(zip(KEY_FIELDS, _KEY_MASKS, strict=True)):
        table[name] = np.array([key[index] & mask for key in keys], dtype=np.uint64)
    return table
