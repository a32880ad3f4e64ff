"""A schedule as tensors: the step's tokens of all sequences one after another, and where they lie in the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sequence import Schedule
from kernels.paged import PagedBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """input_ids, positions [T]; `logits_rows` [R]: the last row of each item that samples, in the schedule's order.

    An item with drafts has one more row for each of them, so its rows end with the last draft's.
    `first_rows` [items]: the first row of each item.
    """

    input_ids: Tensor
    positions: Tensor
    paged: PagedBatch
    logits_rows: Tensor
    first_rows: tuple[int, ...]


def build_batch(schedule: Schedule, block_size: int) -> Batch:
    """Pack the schedule's new tokens; nothing is padded to a rectangle of sequences."""
    input_ids: list[int] = []
    positions: list[int] = []
    logits_rows: list[int] = []
    first_rows: list[int] = []
    query_lens: list[int] = []
    kv_lens: list[int] = []
    tables: list[list[int]] = []
    for item in schedule.items:
        start = item.sequence.num_computed_tokens
        end = start + item.num_new_tokens
        first_rows.append(len(input_ids))
        input_ids += item.sequence.token_ids[start:end]
        input_ids += item.draft_token_ids
        positions += range(start, end)
        query_lens.append(item.num_new_tokens)
        kv_lens.append(end)
        tables.append(item.sequence.block_table[: -(-end // block_size)])
        if item.sample:
            logits_rows += range(len(input_ids) - 1 - len(item.draft_token_ids), len(input_ids))
    return Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        paged=PagedBatch.build(query_lens, kv_lens, tables, block_size),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
        first_rows=tuple(first_rows),
    )
