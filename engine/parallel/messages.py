"""What rank 0 tells the other ranks, and they it, over a Unix socket with a process of this user at either end.

rank 0 ── Load ──► rank        the rank loads its part of the model
rank 0 ◄─ Loaded | Failed ──   and says so, or why it can't
rank 0 ── Join ──►             with the pool's descriptor beside it
rank 0 ── Forward, Logits ──►  each step; then the ranks meet in their group
rank 0 ◄─ Failed ──            a rank that can't go on says why and exits
rank 0 ── Stop ──►

A closed socket ends the rank; to rank 0 it says that the rank has died.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.memory import KvLayout
from kernels.paged import PagedBatch
from kvstore.kv_groups import KvGroups


@dataclass(frozen=True, slots=True)
class Load:
    """`options` are the EngineOptions', `threads` the rank's part of the CPUs."""

    options: Mapping[str, Any]
    threads: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank has its part of the model, cut out of the weights of this digest."""

    weights_digest: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """Why the rank can't go on; `is_expected` if that is the model's or the options' fault, else it is a traceback."""

    reason: str
    is_expected: bool


@dataclass(frozen=True, slots=True)
class Join:
    """The pool has `num_blocks` blocks of the whole model's `layout`; the ranks meet at the file `meeting`."""

    num_blocks: int
    layout: KvLayout
    groups: KvGroups | None
    meeting: str


@dataclass(frozen=True, slots=True)
class Tables:
    """A PagedBatch's fields, tensors as arrays: those are pickled in a tenth of the time."""

    cu_seqlens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: NDArray[Any]
    slot_blocks: NDArray[Any]
    slot_offsets: NDArray[Any]
    block_size: int
    others: "tuple[Tables, ...]"

    @staticmethod
    def of(batch: PagedBatch) -> "Tables":
        return Tables(
            batch.cu_seqlens,
            batch.kv_lens,
            batch.block_tables.numpy(),
            batch.slot_blocks.numpy(),
            batch.slot_offsets.numpy(),
            batch.block_size,
            tuple(map(Tables.of, batch.others)),
        )

    @property
    def batch(self) -> PagedBatch:
        return PagedBatch(
            self.cu_seqlens,
            self.kv_lens,
            torch.from_numpy(self.block_tables),
            torch.from_numpy(self.slot_blocks),
            torch.from_numpy(self.slot_offsets),
            self.block_size,
            tuple(other.batch for other in self.others),
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """`input_ids`, `positions` [T] and where their sequences' KV is."""

    input_ids: NDArray[Any]
    positions: NDArray[Any]
    tables: Tables

    @staticmethod
    def of(input_ids: Tensor, positions: Tensor, batch: PagedBatch) -> "Forward":
        return Forward(input_ids.numpy(), positions.numpy(), Tables.of(batch))

    @property
    def batch(self) -> PagedBatch:
        return self.tables.batch


@dataclass(frozen=True, slots=True)
class Logits:
    """Rows of the last forward's result, as bytes, [num_rows, hidden] of the compute dtype."""

    hidden: bytes
    num_rows: int

    @staticmethod
    def of(hidden: Tensor) -> "Logits":
        return Logits(hidden.contiguous().view(torch.uint8).numpy().tobytes(), hidden.shape[0])

    def rows(self, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(self.hidden), dtype=dtype).view(self.num_rows, -1)


@dataclass(frozen=True, slots=True)
class Stop:
    """There are no more steps."""


def encode(message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> Any:
    return pickle.loads(data)


def send(connection: "Connection[Any, Any]", message: object) -> None:
    """Raises OSError if nobody listens any more."""
    connection.send_bytes(encode(message))


def receive(connection: "Connection[Any, Any]") -> Any:
    """The next message. Raises EOFError or OSError when the other side has ended."""
    return decode(connection.recv_bytes())
