"""An adapter that was read: its matrices by the name of the module they change, and a digest of its content."""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from engine.safetensors_file import FileInMemory, TensorEntry


@dataclass(frozen=True, slots=True, eq=False)
class LoraMatrices:
    """A [rank, num_in] and Bᵀ [rank, num_out] of one module, the scale in B; an embedding's A is [num_ids, rank]."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return int(self.b.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`digest` names the content: equal digests mean equal outputs on the same base model. `rank` is the largest."""

    digest: bytes
    rank: int
    modules: Mapping[str, LoraMatrices] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for each in self.modules.values())


class ContentDigest:
    """SHA-256 of what an adapter computes with: modules in the order of their names, their scales, the stored bytes."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256(b"pw-lora-content-1")

    def add(self, name: str, scale: float, tensors: Mapping[str, TensorEntry], stored: FileInMemory) -> None:
        """The module's `a` and `b`."""
        self._field(name.encode())
        self._field(struct.pack("<d", scale))
        for kind in ("a", "b"):
            entry = tensors[kind]
            self._field(f"{kind} {entry.dtype} {list(entry.shape)}".encode())
            self._field(stored.bytes_of(entry))

    def digest(self) -> bytes:
        return self._sha.digest()

    def _field(self, value: bytes | memoryview) -> None:
        self._sha.update(len(value).to_bytes(8, "little"))
        self._sha.update(value)
