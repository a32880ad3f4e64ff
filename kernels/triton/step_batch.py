"""A step's sequences on the device, as the attention kernels and the KV write take them; made once a step.

Sequences with few new tokens go through `decode_attention`, the others through `prefill_attention`. All of it comes in
one copy of host memory (`place`), or lies in buffers that stay where they are (`engine/decode_step.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.paged import PagedBatch
from kernels.staging import Array, to_device
from kernels.triton.attention_shapes import decode_rows
from kernels.triton.device import device_arch
from kernels.triton.prefill_attention import prefill_tiles


@dataclass(frozen=True, slots=True)
class SequenceTensors:
    """Sequences of a step as the attention kernels take them; `num_tokens` new ones, none longer than `max_kv_len`.

    Those of a batch that has other sequences too begin at `query_starts` in it; `cu_seqlens` counts these ones only.
    """

    cu_seqlens: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    num_tokens: int
    max_kv_len: int


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """`slots` int64 [T], where each token's K and V go, negative for none; `tiles` are those of the `long` sequences.

    `others` are the same tokens in the tables of the model's other KV groups.
    """

    slots: Tensor
    short: SequenceTensors | None
    long: SequenceTensors | None = None
    tiles: Tensor | None = None
    others: tuple["DeviceBatch", ...] = ()

    def of_group(self, group: int) -> "DeviceBatch":
        """The batch as the layers of a KV group see it."""
        return self.others[group - 1] if group else self


def place(batch: PagedBatch, *, group_size: int, head_dim: int, device: torch.device, fp8: bool = False) -> DeviceBatch:
    """The batch on the device, for attention with `group_size` query heads per kv head of `head_dim`; `fp8` caches."""
    lens = [end - start for start, end in pairwise(batch.cu_seqlens)]
    arch = device_arch(device)
    most = decode_rows(head_dim, arch, fp8=fp8) // group_size
    short = [sequence for sequence, length in enumerate(lens) if length <= most]
    long = [sequence for sequence, length in enumerate(lens) if length > most]
    long_kv_lens = [batch.kv_lens[sequence] for sequence in long]
    lens_of_long = [lens[sequence] for sequence in long]
    tiles = prefill_tiles(lens_of_long, long_kv_lens, group_size=group_size, head_dim=head_dim, arch=arch, fp8=fp8)
    arrays: list[Array] = [tiles.numpy()]
    for which in (short, long):
        arrays += _of_sequences(batch, which, lens)
    groups = (batch, *batch.others)
    for group in groups:
        arrays.append((group.slot_blocks * group.block_size + group.slot_offsets).numpy())
        tables = group.block_tables.numpy().astype(np.int32)
        arrays += [tables[short], tables[long]]
    tiles_there, *placed = to_device(arrays, device)
    made = [
        DeviceBatch(
            slots,
            _sequences(batch, short, lens, placed[:3], short_tables),
            _sequences(batch, long, lens, placed[3:6], long_tables),
            tiles_there,
        )
        for slots, short_tables, long_tables in zip(*(placed[6 + i :: 3] for i in range(3)), strict=True)
    ]
    first, *others = made
    return DeviceBatch(first.slots, first.short, first.long, first.tiles, tuple(others))


def _of_sequences(batch: PagedBatch, which: Sequence[int], lens: Sequence[int]) -> list[Array]:
    """cu_seqlens, query_starts, kv_lens of some of its sequences."""
    cu_seqlens = np.cumsum([0, *(lens[sequence] for sequence in which)])
    starts = [batch.cu_seqlens[sequence] for sequence in which]
    kv_lens = [batch.kv_lens[sequence] for sequence in which]
    return [np.asarray(each, dtype=np.int32) for each in (cu_seqlens, starts, kv_lens)]


def _sequences(
    batch: PagedBatch, which: Sequence[int], lens: Sequence[int], tensors: Sequence[Tensor], tables: Tensor
) -> SequenceTensors | None:
    if not which:
        return None
    num_tokens = sum(lens[sequence] for sequence in which)
    longest = max(batch.kv_lens[sequence] for sequence in which)
    cu_seqlens, query_starts, kv_lens = tensors
    return SequenceTensors(cu_seqlens, query_starts, kv_lens, tables, num_tokens, longest)
