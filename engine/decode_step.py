"""One decode step as a function of buffers that stay where they are, so that a CUDA graph of it can be run again.

    fields, by name: tokens, positions, slots, lengths, …      one row for each sequence, in one buffer: one copy a step
    tables [groups, rows, blocks]                             its block tables
    drawn [rows]                                              the tokens of the step before, and then of this one

A row's token is known, or it is what a row of the step before has drawn, of which the host need not know yet. Rows
behind the sequences' are padding: they look at one token of any block, write to no slot, and nobody reads what they
draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from engine.device_sample_rows import filter_arrays, pack_keys
from engine.memory import KvLayers
from engine.models.decoder import Decoder
from engine.sample import SampleRow
from kernels.staging import Array, ByteLayout, to_device
from kernels.triton.sample import sample
from kernels.triton.step_batch import DeviceBatch, SequenceTensors
from kernels.triton.token_filter import Filters

_KEYS = ("logits_rows", "temperature", "seeds", "positions_drawn", "choices")
_FILTERS = ("top_k", "top_p", "min_p_depth")


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A sequence's row: it computes the token at `position`, of which `token_id` is known or row `source` has drawn.

    `tables` are its block tables by KV group, of which the first `num_released` blocks (by group) are gone.
    """

    sample: SampleRow
    position: int
    tables: Sequence[Sequence[int]]
    num_released: Sequence[int]
    token_id: int = 0
    source: int | None = None


class DecodeStep:
    """The model's step for at most `max_rows` sequences of at most `max_model_len` tokens."""

    def __init__(self, model: Decoder, memory: KvLayers, block_size: int, *, max_rows: int, max_model_len: int) -> None:
        self._model = model
        self._memory = memory
        self._device = model.kernels.device
        self._block_size = block_size
        self._num_groups = max(memory.layer_groups) + 1
        self.max_rows = max_rows
        empty = self._arrays([])
        self._layout = ByteLayout(list(empty.values()))
        self._buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=self._device)
        self._fields = dict(zip(empty, self._layout.views(self._buffer), strict=True))
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=self._device)
        width = -(-max_model_len // self._block_size)
        shape = (self._num_groups, max_rows, -(-width // 4) * 4)  # so that every row begins at 16 bytes
        self._tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self.drawn = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        """int64 [max_rows]; -1 where nothing could be drawn."""
        self.fill([])

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        """Brings the rows into the buffers, in the order of everything else that is queued there."""
        self._buffer.copy_(self._layout.pack(list(self._arrays(rows).values()), self._device), non_blocking=True)
        if not rows:
            return
        width = max(row.position for row in rows) // self._block_size + 1
        tables = [self._table_array(rows, group, width) for group in range(self._num_groups)]
        for group, table in enumerate(to_device(tables, self._device)):
            self._tables[group, : len(rows), :width].copy_(table)

    @torch.inference_mode()
    def run(self, num_rows: int, max_kv_len: int) -> Tensor:
        """Computes the first `num_rows` rows, none longer than `max_kv_len`, and draws into `drawn`.

        -> logits [num_rows, V]. Reads and writes buffers only: what it is does not depend on what is in them.
        """
        fields = {name: field[:num_rows] for name, field in self._fields.items()}
        known = torch.cat((self.drawn, self._fields["token_ids"]))
        token_ids = known.index_select(0, fields["sources"]).clamp(min=0)
        starts = self._starts[: num_rows + 1]
        batches = []
        for group in range(self._num_groups):
            tables = self._tables[group, :num_rows]
            sequences = SequenceTensors(starts, starts, fields["kv_lens"], tables, num_rows, max_kv_len)
            batches.append(DeviceBatch(fields[f"slots {group}"], sequences))
        batch = DeviceBatch(batches[0].slots, batches[0].short, others=tuple(batches[1:]))
        logits = self._model.logits(self._model.forward(token_ids, fields["positions"], batch, self._memory))
        drawn = sample(
            logits,
            logits_rows=fields["logits_rows"],
            temperature=fields["temperature"],
            seeds=fields["seeds"],
            positions=fields["positions_drawn"],
            choices=fields["choices"],
            vocab_size=self._model.config.vocab_size,
            filters=Filters(*(fields[name] for name in _FILTERS)),
        )
        self.drawn[:num_rows].copy_(drawn)
        return logits

    def _arrays(self, rows: Sequence[DecodeRow]) -> dict[str, Array]:
        """The rows and the padding behind them, by name."""
        num_rows, size, samples = len(rows), self._block_size, [row.sample for row in rows]

        def padded(values: Sequence[int] | Array, dtype: DTypeLike, padding: int = 0) -> Array:
            behind = np.full(self.max_rows - num_rows, padding, dtype)
            return np.concatenate((np.asarray(values, dtype), behind))

        known = range(self.max_rows, 2 * self.max_rows)  # behind the drawn ones, see `run`
        arrays: dict[str, Array] = {
            "token_ids": padded([row.token_id for row in rows], np.int64),
            "sources": padded(
                [known[i] if row.source is None else row.source for i, row in enumerate(rows)], np.int64, self.max_rows
            ),
            "positions": padded([row.position for row in rows], np.int64),
            "kv_lens": padded([row.position + 1 for row in rows], np.int32, 1),
        }
        of_samples = [*pack_keys(samples), *filter_arrays([each.params for each in samples])]
        for name, array in zip((*_KEYS, *_FILTERS), of_samples, strict=True):
            arrays[name] = padded(array, array.dtype)
        arrays["logits_rows"] = np.arange(self.max_rows, dtype=np.int32)  # each its own
        for group in range(self._num_groups):
            slots = [row.tables[group][row.position // size] * size + row.position % size for row in rows]
            arrays[f"slots {group}"] = padded(slots, np.int64, -1)
        return arrays

    def _table_array(self, rows: Sequence[DecodeRow], group: int, width: int) -> Array:
        """int32 [rows, width]; what lies behind a row's length is never read."""
        tables = np.zeros((len(rows), width), dtype=np.int32)
        for i, row in enumerate(rows):
            count = row.position // self._block_size + 1
            tables[i, :count] = row.tables[group][:count]
            first = row.num_released[group] if row.num_released else 0
            # A tile of the KV may begin before the window: what is there must be the sequence's own.
            tables[i, :first] = tables[i, first] if first else 0
        return tables
