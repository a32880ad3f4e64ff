"""What a step's sequences look like to a kernel: packed tokens, block tables, slots, and the plan of the attention.

Tokens of all sequences lie one after another, without padding: sequence s has rows cu_seqlens[s] : cu_seqlens[s + 1].

    cache            one layer's K or V, [num_blocks, num_kv_heads, block_size, head_dim]
    block table      row s lists sequence s's blocks in order; entries past its end are 0 and never contribute
    slot             block id * block_size + offset in the block
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SPLIT_TOKENS = 256
"""KV tokens reduced at a time, counted from position 0; a multiple of it starts every split, in every path."""


def indices(values: Sequence[int]) -> Tensor:
    """An int64 tensor of them; made by numpy, which takes a third of torch.tensor's time for a few."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


class StepBatch(Protocol):
    """The sequences of a step as a kernel set takes them: `PagedBatch`, or `kernels.triton.step_batch.DeviceBatch`."""

    def of_group(self, group: int) -> Any:
        """The batch as the layers of a KV group see it."""
        ...


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The sequences of one step. All lengths are in tokens; `kv_lens` counts the step's own tokens too.

    `others` are the same tokens in the tables of the model's other KV groups, if it has several.
    """

    cu_seqlens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    block_size: int
    others: tuple["PagedBatch", ...] = ()

    def of_group(self, group: int) -> "PagedBatch":
        """The batch as the layers of a KV group see it."""
        return self.others[group - 1] if group else self

    @staticmethod
    def build(
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        firsts: Sequence[int] = (),
    ) -> "PagedBatch":
        """Pack sequences; the last `query_lens[s]` of `kv_lens[s]` tokens are the ones computed in this step.

        `firsts[s]`: that many entries of table s stand for nothing, since its layers' window has left them behind. The
        kernels read and hide whole splits, so what is there must be the sequence's own: its first block, which has no
        row behind the sequence's end (`kvstore.kv_groups.plan_groups`).
        """
        cu_seqlens = [0]
        offsets: list[int] = []
        for query_len, kv_len, table in zip(query_lens, kv_lens, block_tables, strict=True):
            if not 0 < query_len <= kv_len <= len(table) * block_size:
                raise ValueError(
                    f"a sequence of {kv_len} tokens, {query_len} of them new, does not fit {len(table)} blocks "
                    f"of {block_size}"
                )
            cu_seqlens.append(cu_seqlens[-1] + query_len)
            offsets += [position % block_size for position in range(kv_len - query_len, kv_len)]
        lengths = (tuple(cu_seqlens), tuple(kv_lens))
        return PagedBatch._of_tables(*lengths, block_tables, block_size, firsts, indices(offsets))

    def in_tables(self, block_tables: Sequence[Sequence[int]], firsts: Sequence[int] = ()) -> "PagedBatch":
        """The same tokens in the tables, as long as these, of another KV group; lengths and offsets are shared."""
        return self._of_tables(self.cu_seqlens, self.kv_lens, block_tables, self.block_size, firsts, self.slot_offsets)

    @staticmethod
    def _of_tables(
        cu_seqlens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        firsts: Sequence[int],
        slot_offsets: Tensor,
    ) -> "PagedBatch":
        slot_blocks: list[int] = []
        for start, end, kv_len, table in zip(cu_seqlens, cu_seqlens[1:], kv_lens, block_tables, strict=False):
            slot_blocks += [table[position // block_size] for position in range(kv_len - (end - start), kv_len)]
        width = max((len(table) for table in block_tables), default=0)
        tables = np.zeros((len(block_tables), width), dtype=np.int64)  # cheaper row by row than torch
        for row, (table, first) in enumerate(zip(block_tables, firsts or (0,) * len(block_tables), strict=True)):
            tables[row, first : len(table)] = table[first:]
            if first:
                tables[row, :first] = tables[row, first]
        return PagedBatch(cu_seqlens, kv_lens, torch.from_numpy(tables), indices(slot_blocks), slot_offsets, block_size)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]


@dataclass(frozen=True, slots=True)
class SplitStep:
    """One step of the attention: every active tile reduces its next split of the KV.

    active     rows of the tile array that still have a split to reduce; None when all have
    blocks     [pairs, blocks per split]: the block ids of each distinct (sequence, split) among them
    pair       for each active tile, its row of `blocks`
    hidden     [active tiles, 1, rows, split tokens]: what each row must not see; None when it sees everything
    missing    [pairs, 1, split tokens, 1]: what lies past the sequence's end, in its last block or in block 0, where
               others' values are; None when nothing does
    """

    active: Tensor | None
    blocks: Tensor
    pair: tuple[int, ...]
    hidden: Tensor | None
    missing: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the attention of all layers with one window is computed; made once a step, on the host.

    A tile is `tile_rows` query rows of one kv head: `tokens_per_tile` tokens times `group_size` query heads.
    `gather` [tiles, tokens_per_tile] are the tokens' rows in the batch (padding repeats a tile's last token), and
    `scatter` [num_tokens] says where, in [tiles * tokens_per_tile], each token's result lies.
    """

    batch: PagedBatch
    group_size: int
    window: int | None
    tile_rows: int
    tokens_per_tile: int
    gather: Tensor
    scatter: Tensor
    steps: tuple[SplitStep, ...]


def split_size(block_size: int) -> int:
    """Tokens of one split: whole blocks, `SPLIT_TOKENS` where they divide it."""
    return max(SPLIT_TOKENS // block_size, 1) * block_size


def plan_attention(batch: PagedBatch, *, group_size: int, window: int | None) -> AttentionPlan:
    """Cut the batch into tiles and the KV into splits. A token sees the `window` latest positions, its own included.

    Splits begin at multiples of a fixed size and each tile takes its own in ascending order, so a token meets the same
    sequence of partial sums in a decode step, in any chunk, and beside any neighbours.
    """
    tile_rows = -(-group_size // 8) * 8
    tokens_per_tile = tile_rows // group_size
    size = split_size(batch.block_size)
    gather: list[list[int]] = []
    scatter: list[int] = []
    sequences: list[int] = []
    positions: list[list[int]] = []
    first_splits: list[int] = []
    last_splits: list[int] = []
    for sequence, kv_len in enumerate(batch.kv_lens):
        start, end = batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1]
        offset = kv_len - end  # position = row + offset
        for row in range(start, end, tokens_per_tile):
            rows = [min(r, end - 1) for r in range(row, row + tokens_per_tile)]
            scatter += range(len(gather) * tokens_per_tile, len(gather) * tokens_per_tile + min(end - row, len(rows)))
            gather.append(rows)
            sequences.append(sequence)
            positions.append([r + offset for r in rows])
            earliest = 0 if window is None else max(0, row + offset - window + 1)
            first_splits.append(earliest // size)
            last_splits.append((rows[-1] + offset) // size)
    position = torch.tensor(positions, dtype=torch.int64).repeat_interleave(group_size, dim=1)
    padding = tile_rows - position.shape[1]
    if padding:
        position = torch.cat([position, position[:, -1:].expand(-1, padding)], dim=1)
    num_steps = max(last - first for first, last in zip(first_splits, last_splits, strict=True)) + 1
    steps = tuple(
        _plan_step(batch, step, sequences, first_splits, last_splits, position, window, size)
        for step in range(num_steps)
    )
    return AttentionPlan(
        batch=batch,
        group_size=group_size,
        window=window,
        tile_rows=tile_rows,
        tokens_per_tile=tokens_per_tile,
        gather=torch.tensor(gather, dtype=torch.int64),
        scatter=torch.tensor(scatter, dtype=torch.int64),
        steps=steps,
    )


def _plan_step(
    batch: PagedBatch,
    step: int,
    sequences: Sequence[int],
    first_splits: Sequence[int],
    last_splits: Sequence[int],
    position: Tensor,
    window: int | None,
    size: int,
) -> SplitStep:
    """The step in which each tile reduces its split number first + step."""
    active = [tile for tile, first in enumerate(first_splits) if first + step <= last_splits[tile]]
    pairs: dict[tuple[int, int], int] = {}
    pair = [pairs.setdefault((sequences[tile], first_splits[tile] + step), len(pairs)) for tile in active]
    blocks_per_split = size // batch.block_size
    tables = torch.nn.functional.pad(batch.block_tables, (0, blocks_per_split))
    blocks = torch.stack(
        [
            tables[sequence, min(split * blocks_per_split, tables.shape[1] - blocks_per_split) :][:blocks_per_split]
            for sequence, split in pairs
        ]
    )
    active_rows = None if len(active) == len(first_splits) else torch.tensor(active, dtype=torch.int64)
    begin = torch.tensor([(first_splits[tile] + step) * size for tile in active], dtype=torch.int64)
    key = begin[:, None, None] + torch.arange(size)
    query = (position if active_rows is None else position[active_rows])[:, :, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    lengths = torch.tensor([batch.kv_lens[sequence] - split * size for sequence, split in pairs], dtype=torch.int64)
    missing = torch.arange(size) >= lengths[:, None]
    return SplitStep(
        active_rows,
        blocks,
        tuple(pair),
        hidden[:, None] if bool(hidden.any()) else None,
        missing[:, None, :, None] if bool(missing.any()) else None,
    )
