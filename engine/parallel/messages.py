"""What rank 0 tells the other ranks, and they it.

Over a Unix socket with a process of this user at either end, or, with a rank on another machine, over TCP.

rank 0 ── Load ──► rank        the rank loads its part of the model
rank 0 ◄─ Loaded | Failed ──   and says so, or why it can't
rank 0 ── Join ──►             on one machine with the descriptors of the pool and of shared memory beside it
rank 0 ── PutAdapter ──►       before the first step that needs it; then the ranks agree in their group
rank 0 ── PutBlocks ──►        to another machine, before the first step that reads them
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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.lora.adapter import Adapter, LoraMatrices
from engine.lora.step import LoraStep
from engine.memory import KvLayout
from engine.parallel.tables import BatchChanges
from kvstore.kv_groups import KvGroups


@dataclass(frozen=True, slots=True)
class Load:
    """`options` are the EngineOptions'; `num_sharing` ranks share the CPUs and the memory of the rank's machine."""

    options: Mapping[str, Any]
    num_sharing: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank has its part of the model, cut out of the weights of this digest; so much memory is left there."""

    weights_digest: bytes
    numerics_class: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Why the rank can't go on; `is_expected` if that is the model's or the options' fault, else it is a traceback."""

    reason: str
    is_expected: bool


@dataclass(frozen=True, slots=True)
class Join:
    """The pool has `num_blocks` blocks of the whole model's `layout`; the ranks meet at `meeting`.

    Or, if that is "", in the shared memory whose descriptor comes after the pool's. If the rank does not share the
    pool, it has one of its own heads. If ranks `tell`, rank 0 gathers what they store in a step.
    """

    num_blocks: int
    layout: KvLayout
    groups: KvGroups | None
    meeting: str
    shares_pool: bool = True
    tells: bool = False

    @property
    def has_descriptors(self) -> bool:
        """Some come beside it."""
        return self.shares_pool or not self.meeting


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor of any type, as bytes."""

    data: NDArray[Any]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "Values":
        data = tensor.contiguous().view(torch.uint8).cpu().numpy()
        return Values(data, tuple(tensor.shape), tensor.dtype)

    @property
    def tensor(self) -> Tensor:
        return torch.from_numpy(self.data).view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """The rank's heads of these blocks: `cells` [len(block_ids), *its pool's block_shape]."""

    block_ids: NDArray[np.int64]
    cells: Values

    @staticmethod
    def of(block_ids: NDArray[np.int64], cells: Tensor) -> "PutBlocks":
        return PutBlocks(block_ids, Values.of(cells))


@dataclass(frozen=True, slots=True)
class Forward:
    """`input_ids`, `positions` [T] and where their sequences' KV is; `slots`: each token's adapter, if any has one."""

    input_ids: NDArray[Any]
    positions: NDArray[Any]
    changes: BatchChanges
    slots: NDArray[Any] | None = None

    @staticmethod
    def of(input_ids: Tensor, positions: Tensor, changes: BatchChanges, adapters: LoraStep | None = None) -> "Forward":
        return Forward(input_ids.cpu().numpy(), positions.cpu().numpy(), changes, _slots(adapters))


@dataclass(frozen=True, slots=True)
class Logits:
    """Rows of the last forward's result, [num_rows, hidden] of the compute dtype, and their adapters' slots."""

    hidden: Values
    slots: NDArray[Any] | None = None

    @staticmethod
    def of(hidden: Tensor, adapters: LoraStep | None = None) -> "Logits":
        return Logits(Values.of(hidden), _slots(adapters))


@dataclass(frozen=True, slots=True)
class PutAdapter:
    """A rank's part of an adapter is to lie in `slot`; then the ranks agree on whether all could do it."""

    slot: int
    digest: bytes
    modules: Mapping[str, tuple[Values, Values]]

    @staticmethod
    def of(slot: int, part: Adapter) -> "PutAdapter":
        modules = {name: (Values.of(each.a), Values.of(each.b)) for name, each in part.modules.items()}
        return PutAdapter(slot, part.digest, modules)

    @property
    def adapter(self) -> Adapter:
        modules = {name: LoraMatrices(a.tensor, b.tensor) for name, (a, b) in self.modules.items()}
        return Adapter(self.digest, max(each.rank for each in modules.values()), modules)


@dataclass(frozen=True, slots=True)
class Stop:
    """There are no more steps."""


def _slots(adapters: LoraStep | None) -> NDArray[Any] | None:
    return None if adapters is None else np.array(adapters.slots, np.int16)


def encode(message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> Any:
    return pickle.loads(data)


def send(connection: "Connection[Any, Any]", message: object) -> None:
    """Raises OSError if nobody listens any more."""
    connection.send_bytes(encode(message))


def last_words(connection: "Connection[Any, Any]") -> str | None:
    """Why the rank at the other end can't go on, if it has said so."""
    try:
        while connection.poll():
            if isinstance(said := receive(connection), Failed):
                return f"has failed: {said.reason}"
    except (EOFError, OSError):
        return None
    except Exception as error:
        return f"has said what can't be read: {error!r}"
    return None


def receive(connection: "Connection[Any, Any]") -> Any:
    """The next message. Raises EOFError or OSError when the other side has ended."""
    return decode(connection.recv_bytes())
