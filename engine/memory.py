"""The KV pool's memory: blocks of cells, one after another, in memory that peers can read."""

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Backing = Literal["private", "memfd"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The order of one block's cells: [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.block_shape)) * self.dtype.itemsize

    @property
    def layout_id(self) -> str:
        """Names the order of bytes in a block. `canonical`: cells as above, row-major inside."""
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"l{self.num_layers}.h{self.num_kv_heads}.b{self.block_size}.d{self.head_dim}"
        return f"canonical/{shape}/{dtype}"


class KvLayers(Protocol):
    """The cache as a model's layers see it."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The layer's K and V, views [num_blocks, num_kv_heads, block_size, head_dim] (64-bit strides)."""
        ...


class KvMemory:
    """A pool of `num_blocks` blocks, all zero at first (so unused slots are finite), and a generation for each.

    buffer         uint8 [num_blocks, block_bytes], at `address`; with "memfd" also reachable through `fd`
    generations    uint64 [num_blocks], raised by the block pool whenever it hands the block out

    On another device than the CPU only `blocks` are there: `buffer`, which planes and tiers read, is empty.

    "private" is anonymous memory in huge pages where the system gives them; "memfd" is shared memory, which often can't
    have huge pages (attention reads it 1.08-1.23 times slower, DESIGN §6).
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, backing: Backing = "private", device: torch.device = _CPU
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.backing = backing
        num_host_blocks = num_blocks if device.type == "cpu" else 0
        self._pool = _Region("pagewire-kv", num_host_blocks * layout.block_bytes, backing)
        self._stamps = _Region("pagewire-generations", num_blocks * 8, backing)
        self.buffer: NDArray[np.uint8] = self._pool.array.reshape(num_host_blocks, layout.block_bytes)
        self.generations: NDArray[np.uint64] = self._stamps.array.view(np.uint64)
        if device.type == "cpu":
            flat = torch.from_numpy(self.buffer).view(layout.dtype)
        else:
            flat = torch.zeros(
                num_blocks, layout.block_bytes // layout.dtype.itemsize, dtype=layout.dtype, device=device
            )
        self.blocks: Tensor = flat.view(num_blocks, *layout.block_shape)
        # Made once: a pair of views costs 10 us, in each layer of each step.
        self._layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (self.blocks[:, layer, 0], self.blocks[:, layer, 1]) for layer in range(layout.num_layers)
        )

    @property
    def address(self) -> int:
        return self._pool.address

    @property
    def fd(self) -> int | None:
        return self._pool.fd

    @property
    def generations_address(self) -> int:
        return self._stamps.address

    @property
    def generations_fd(self) -> int | None:
        return self._stamps.fd

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The layer's K and V, views [num_blocks, num_kv_heads, block_size, head_dim] (64-bit strides)."""
        return self._layers[index]

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all cells of block `src` over block `dst`."""
        self.blocks[dst].copy_(self.blocks[src])

    def close(self) -> None:
        """Give the memory back; views handed out earlier keep it mapped until they go."""
        self.buffer = np.empty((0, self.layout.block_bytes), dtype=np.uint8)
        self.generations = np.empty(0, dtype=np.uint64)
        self.blocks = torch.empty(0)
        self._layers = ()
        self._pool.close()
        self._stamps.close()


class _Region:
    """Zero-filled memory as a numpy array, private or behind a memfd."""

    def __init__(self, name: str, num_bytes: int, backing: Backing) -> None:
        self.fd: int | None = None
        length = max(num_bytes, 1)
        if backing == "memfd":
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
            os.ftruncate(self.fd, length)
            mapping = mmap.mmap(self.fd, length, mmap.MAP_SHARED)
        else:
            mapping = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small ones serve, only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # The array keeps the mapping alive; it is unmapped when the last view of it goes.
        self.array: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)[:num_bytes]
        self.address = self.array.ctypes.data

    def close(self) -> None:
        self.array = np.empty(0, dtype=np.uint8)
        self.address = 0
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
