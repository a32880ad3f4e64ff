"""Draws from whole rows by the native kernels: min-p, top-k, top-p, and who can win (src/ops/draws.h)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.looks import CONTENDERS, Key, keys_of

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

_MARGIN = 2e-6
"""By so much, relatively, sums of powers may differ from numpy's (each good to 4 units in the last place)."""
_OWN_MARGIN = 1e-9
"""... and from sums of the same powers in another order."""

DRAW = np.dtype(
    [
        *(("logits", "u8"), ("ids", "u8"), ("powers", "u8"), ("count", "i8"), ("top_k", "i8"), ("temperature", "f8")),
        *(("depth", "f8"), ("top_p", "f8"), ("margin", "f8"), ("key", keys_of([]).dtype), ("state", "i4")),
        *(("likeliest", "i8"), ("num_contenders", "i8"), ("contenders", "i8", CONTENDERS)),
    ],
    align=True,
)


class State(IntEnum):
    """How a draw went."""

    DRAWN = 0
    NOT_FINITE = 1
    """There is a NaN, or the largest is infinite."""
    UNSURE = 2
    """Top-p's edge is closer than the sums are good for."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw from logits [N], of `ids` [N] ascending, or of 0 … N - 1 without.

    `depth` is T ln(min_p), -inf for none. `powers` [N] float32, if there: e^((logit - the largest) / T).
    """

    logits: Row
    ids: Ids | None = None
    temperature: float = 0.0
    key: Key = (0, 0, 0, 0)
    depth: float = -np.inf
    top_k: int = 0
    top_p: float = 1.0
    powers: Row | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """`likeliest` is an index. `contenders`, ascending indexes, are all that may be argmax(logit / T + noise), of the
    candidates that the filters leave; None if there are too many. Scores are good to 1e-5 here and everything within
    1e-4 of the best is kept, so the exact scores of what is left decide.
    """

    state: State
    likeliest: int
    contenders: Ids | None


def run(ops: Any, draws: Sequence[Draw]) -> list[Drawn]:
    """Each by itself. At temperature 0 the likeliest alone is looked for."""
    table = np.empty(len(draws), dtype=DRAW)
    rows = [np.ascontiguousarray(draw.logits, dtype=np.float32) for draw in draws]
    ids = [None if draw.ids is None else np.ascontiguousarray(draw.ids, dtype=np.int64) for draw in draws]
    powers = [None if draw.powers is None else np.ascontiguousarray(draw.powers) for draw in draws]
    for name in ("temperature", "depth", "top_p"):
        table[name] = [getattr(draw, name) for draw in draws]
    table["top_k"] = [min(draw.top_k, 2**62) for draw in draws]
    table["logits"], table["ids"], table["powers"] = _addresses(rows), _addresses(ids), _addresses(powers)
    table["count"] = [len(row) for row in rows]
    table["margin"] = [_MARGIN if own is None else _OWN_MARGIN for own in powers]
    table["key"] = keys_of([draw.key for draw in draws])
    ops.draws(table.ctypes.data, len(draws))
    columns = (table[name].tolist() for name in ("state", "likeliest", "num_contenders"))
    return [
        Drawn(State(state), likeliest, None if count < 0 else np.sort(table["contenders"][i, :count]))
        for i, (state, likeliest, count) in enumerate(zip(*columns, strict=True))
    ]


def _addresses(arrays: Sequence[NDArray[Any] | None]) -> list[int]:
    return [0 if array is None else int(array.ctypes.data) for array in arrays]
