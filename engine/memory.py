"""The KV pool's memory: blocks of cells, one after another, in memory that peers can read."""

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.transfer.block_io import BlockIo, HostBlocks, StagedIo
from kernels.kv_cells import Cells, KvFormat, QuantizedCells, cell_bytes
from kvstore.kv_groups import KvGroups

logger = logging.getLogger(__name__)

Backing = Literal["private", "memfd"]

_CPU = torch.device("cpu")

KV_FORMATS: Mapping[str, KvFormat | None] = {"auto": None, "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "int8": "int8"}
"""By the option kv_cache_dtype; None is the compute dtype."""


class CachedConfig(Protocol):
    """What a model's config says of its cache."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_latent(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The order of one block's cells: [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim].

    Of a `latent` cache there is one cell instead of K and V: what both are made of (`engine/mla.py`).

    With a `kv_format` values are of that format instead of `dtype`, and a cell is bytes: [cell_bytes], see
    `kernels/kv_cells.py`. Of a model with several KV groups a block has the layers of one group: `num_layers` are
    those of a group.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_format: KvFormat | None = None
    latent: bool = False

    @staticmethod
    def of(
        config: CachedConfig, block_size: int, *, num_layers: int | None = None, kv_format: KvFormat | None = None
    ) -> "KvLayout":
        """Of a model; `num_layers` of a KV group, if not all."""
        layers = config.num_layers if num_layers is None else num_layers
        sizes = (config.num_kv_heads, config.head_dim, block_size)
        return KvLayout(layers, *sizes, config.dtype, kv_format, config.is_latent)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the pool's elements."""
        return self.dtype if self.kv_format is None else torch.uint8

    @property
    def block_shape(self) -> tuple[int, ...]:
        cell: tuple[int, ...] = (self.block_size, self.head_dim)
        if self.kv_format is not None:
            cell = (cell_bytes(self.block_size, self.head_dim),)
        return (self.num_layers, 1 if self.latent else 2, self.num_kv_heads, *cell)

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.block_shape)) * self.stored_dtype.itemsize

    @property
    def layout_id(self) -> str:
        """Names the order of bytes in a block. `canonical`: cells as above, row-major inside."""
        dtype = self.kv_format or str(self.dtype).removeprefix("torch.")
        heads = "latent" if self.latent else f"h{self.num_kv_heads}"
        return f"canonical/l{self.num_layers}.{heads}.b{self.block_size}.d{self.head_dim}/{dtype}"


class KvLayers(Protocol):
    """The cache as a model's layers see it; `layer_groups` has the KV group of each."""

    @property
    def layer_groups(self) -> tuple[int, ...]: ...
    def layer(self, index: int) -> tuple[Cells, Cells]:
        """The layer's K and V, views [num_blocks, num_kv_heads, block_size, head_dim] (64-bit strides)."""
        ...


class KvMemory:
    """A pool of `num_blocks` blocks, all zero at first (so unused slots are finite), and a generation for each.

    buffer         uint8 [num_blocks, block_bytes], at `address`; with "memfd" also reachable through `fd`
    generations    uint64 [num_blocks], raised by the block pool whenever it hands the block out

    `layer_groups` has the KV group of each of the model's layers.

    `io` is how the host's threads read and write blocks. Of a pool in device memory (`staged`) the host sees nothing
    else: `buffer` has no rows. `staged` is what another device than the CPU needs, and what tests do with the CPU's.

    "private" is anonymous memory in huge pages where the system gives them; "memfd" is shared memory, which often can't
    have huge pages (attention reads it 1.08-1.23 times slower, DESIGN §6).
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        backing: Backing = "private",
        device: torch.device = _CPU,
        groups: KvGroups | None = None,
        *,
        staged: bool | None = None,
    ) -> None:
        """`groups`: those of the model's layers; None: one with the layout's layers."""
        staged = device.type != "cpu" if staged is None else staged
        self.layout = layout
        self.num_blocks = num_blocks
        self.backing = backing
        num_host_blocks = 0 if staged else num_blocks
        self._pool = _Region("pagewire-kv", num_host_blocks * layout.block_bytes, backing)
        self._stamps = _Region("pagewire-generations", num_blocks * 8, backing)
        self.buffer: NDArray[np.uint8] = self._pool.array.reshape(num_host_blocks, layout.block_bytes)
        self.generations: NDArray[np.uint64] = self._stamps.array.view(np.uint64)
        if staged:
            size = layout.block_bytes // layout.stored_dtype.itemsize
            flat = torch.zeros(num_blocks, size, dtype=layout.stored_dtype, device=device)
        else:
            flat = torch.from_numpy(self.buffer).view(layout.stored_dtype)
        self.blocks: Tensor = flat.view(num_blocks, *layout.block_shape)
        self._staging = _stage(self.blocks) if staged else None
        self.io: BlockIo = HostBlocks(self.buffer) if self._staging is None else self._staging
        self.groups = groups
        # Made once: a pair of views costs 10 us, in each layer of each step.
        self._layers, self.layer_groups = layer_views(self.blocks, layout, groups)

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

    def layer(self, index: int) -> tuple[Cells, Cells]:
        """The layer's K and V, views [num_blocks, num_kv_heads, block_size, head_dim] (64-bit strides)."""
        return self._layers[index]

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all cells of block `src` over block `dst`."""
        self.blocks[dst].copy_(self.blocks[src])

    def prefault(self, num_threads: int) -> None:
        """Gives every page of the host's pool memory now, which else the first one to write to it waits for.

        Before the pool is in use: it writes zeros. Where memory was lazily given to a virtual machine that takes
        milliseconds a megabyte, else a tenth of one.
        """
        pages = self._pool.array[:: mmap.PAGESIZE]
        if not len(pages):
            return
        started = time.perf_counter()
        size = -(-len(pages) // num_threads)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="prefault") as threads:
            list(threads.map(lambda first: pages[first : first + size].fill(0), range(0, len(pages), size)))
        megabytes = self._pool.array.nbytes / 2**20
        logger.info("KV pool: %.1f MiB are there after %.1f s", megabytes, time.perf_counter() - started)

    def step_launched(self) -> None:
        """On the device thread, after a step's kernels were launched: copies of blocks wait for them."""
        if self._staging is not None:
            self._staging.step_launched()

    @property
    def num_busy_lanes(self) -> int:
        """Lanes of staging that somebody has; none when no transfer and no tier is at work."""
        return 0 if self._staging is None else self._staging.num_busy

    def close(self) -> None:
        """Give the memory back; views handed out earlier keep it mapped until they go."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self.buffer = np.empty((0, self.layout.block_bytes), dtype=np.uint8)
        self.io = HostBlocks(self.buffer)
        self.generations = np.empty(0, dtype=np.uint64)
        self.blocks = torch.empty(0)
        self._layers = ()
        self._pool.close()
        self._stamps.close()


def _stage(blocks: Tensor) -> StagedIo:
    from engine.device_staging import Staging  # it imports triton

    return Staging(blocks)


def layer_views(
    blocks: Tensor, layout: KvLayout, groups: KvGroups | None
) -> tuple[tuple[tuple[Cells, Cells], ...], tuple[int, ...]]:
    """K and V of each layer of the model in `blocks` [num_blocks, *block_shape], or in some heads of it; its group.

    Both are the same cells where these are latents.
    """

    def cells(layer: int, which: int) -> Cells:
        own = blocks[:, layer, which]
        if layout.kv_format is None:
            return own
        return QuantizedCells.view(layout.kv_format, own, layout.block_size, layout.head_dim, keys=which == 0)

    firsts = [cells(layer, 0) for layer in range(layout.num_layers)]
    views = [(first, first if layout.latent else cells(layer, 1)) for layer, first in enumerate(firsts)]
    own = () if groups is None else groups.groups
    num_layers = sum(len(group.layers) for group in own) or layout.num_layers
    places = [
        groups.place(layer) if groups is not None and own[0].layers else (0, layer) for layer in range(num_layers)
    ]
    return tuple(views[number] for _, number in places), tuple(group for group, _ in places)


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
