"""Which of a row's tokens can win the draw, found by the native kernels (src/ops/gumbel.h)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def contenders(
    ops: Any,
    logits: NDArray[np.float32],
    token_ids: NDArray[np.int64] | None,
    temperature: float,
    key: tuple[int, int, int, int],
) -> NDArray[np.int64] | None:
    """Indexes, ascending, of all that may be argmax(logit / temperature + gumbel noise); None if there are too many.

    logits [N] finite or -inf, one finite at least. `token_ids` [N] ascending; None: 0 … N - 1. `key`: seed, position,
    choice, domain, as in engine/philox.py. Scores are good to 1e-5 here and everything within 1e-4 of the best is
    kept, so the exact scores of what is left decide.
    """
    row = np.ascontiguousarray(logits, dtype=np.float32)
    ids = None if token_ids is None else np.ascontiguousarray(token_ids, dtype=np.int64)
    found = np.empty(ops.GUMBEL_ROOM, dtype=np.int64)
    seed, position, choice, domain = key
    count = ops.gumbel(
        *(row.ctypes.data, 0 if ids is None else ids.ctypes.data, len(row), temperature),
        *(seed & 0xFFFF_FFFF_FFFF_FFFF, position & 0xFFFF_FFFF, choice & 0xFFFF_FFFF, domain & 0xFFFF_FFFF),
        found.ctypes.data,
    )
    return None if count < 0 else np.sort(found[:count])
