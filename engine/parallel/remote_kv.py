"""The KV of ranks on other machines or devices, as rank 0 sees it. They can't map its pool: each has one of its heads.

Rank 0's pool stays whole, so that planes, tiers, lending and copies know nothing of ranks:

before a step  a rank is sent of the blocks that the step reads those that it lacks    (engine/parallel/known_blocks.py)
after a step   all say what they have stored of the step's tokens                      (engine/parallel/kv_rows.py)

That is two numbers for a dimension of a kv head, token and layer, where the sums of the step have taken two float32 for
each of the hidden size.
"""

from collections.abc import Callable, Mapping

import torch

from engine.memory import KvMemory
from engine.parallel.group import RankGroup
from engine.parallel.heads import KvHeads
from engine.parallel.known_blocks import KnownBlocks
from engine.parallel.kv_rows import put_rows, take_rows
from engine.parallel.messages import PutBlocks
from kernels.paged import PagedBatch

_MESSAGE_BYTES = 64 << 20


class RemoteKv:
    """Rank 0's side."""

    def __init__(
        self,
        memory: KvMemory,
        heads: Mapping[int, range],
        tellers: Mapping[int, range],
        tell: Callable[[int, object], None],
        group: RankGroup,
        own: KvHeads,
    ) -> None:
        """`heads` of the ranks that are elsewhere; `tellers`, those of them whose rows rank 0 needs; `own`: its heads.

        `tell(rank, message)` raises EngineDied if the rank has ended.
        """
        self._memory = memory
        self._heads = heads
        self._views = {rank: KvHeads(memory.blocks, memory.layout, memory.groups, own) for rank, own in tellers.items()}
        self._tell = tell
        self._group = group
        self._own = own
        self._known = KnownBlocks(memory.num_blocks)
        self._at_once = max(1, _MESSAGE_BYTES // memory.layout.block_bytes)

    def bring(self, batch: PagedBatch) -> None:
        """Before the step is told: what they lack for it."""
        missing = self._known.missing(batch, self._memory.generations)
        for start in range(0, len(missing), self._at_once):
            ids = missing[start : start + self._at_once]
            cells = self._memory.blocks[torch.from_numpy(ids)]
            for rank, own in self._heads.items():
                self._tell(rank, PutBlocks.of(ids, cells[:, :, :, own.start : own.stop]))

    def collect(self, batch: PagedBatch) -> None:
        """After the step: rank 0's pool gets what they have stored."""
        if self._views and (rows := self._group.gather(take_rows(self._own, batch))) is not None:
            for rank, view in self._views.items():
                put_rows(view, batch, rows[rank])
        self._known.note(batch, self._memory.generations)
