"""A schedule as tensors: the step's tokens of all sequences one after another, and where they lie in the cache."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

from engine.sequence import Schedule, Sequence
from kernels.paged import PagedBatch, indices


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


def build_batch(schedule: Schedule, block_size: int, drawn: Mapping[Sequence, int] = MappingProxyType({})) -> Batch:
    """Pack the schedule's new tokens; nothing is padded to a rectangle of sequences.

    `drawn`: what the step before it has drawn for sequences that do not know it yet.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    logits_rows: list[int] = []
    first_rows: list[int] = []
    query_lens: list[int] = []
    kv_lens: list[int] = []
    # A KV group has the table's first blocks no more where its window has left them.
    num_groups = max((len(item.sequence.tables) for item in schedule.items), default=1)
    tables: list[list[list[int]]] = [[] for _ in range(num_groups)]
    firsts: list[list[int]] = [[] for _ in range(num_groups)]
    for item in schedule.items:
        start = item.start
        end = start + item.num_new_tokens
        first_rows.append(len(input_ids))
        input_ids += [drawn[item.sequence]] if item.is_ahead else item.sequence.token_ids[start:end]
        input_ids += item.draft_token_ids
        positions += range(start, end)
        query_lens.append(item.num_new_tokens)
        kv_lens.append(end)
        num_blocks, released = -(-end // block_size), item.sequence.num_released or (0,)
        for group, table in enumerate(item.sequence.tables):
            tables[group].append(table[:num_blocks])
            firsts[group].append(released[group])
        if item.sample:
            logits_rows += range(len(input_ids) - 1 - len(item.draft_token_ids), len(input_ids))
    paged = PagedBatch.build(query_lens, kv_lens, tables[0], block_size, firsts[0])
    others = tuple(paged.in_tables(own, skipped) for own, skipped in zip(tables[1:], firsts[1:], strict=True))
    return Batch(
        input_ids=indices(input_ids),
        positions=indices(positions),
        paged=replace(paged, others=others) if others else paged,
        logits_rows=indices(logits_rows),
        first_rows=tuple(first_rows),
    )
