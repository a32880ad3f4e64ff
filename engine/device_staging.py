"""Pinned host memory through which blocks of a pool in device memory come and go. See `BlockIo`.

    out   last step's event ─► gather kernel ─► one copy to pinned memory ─► event ─► the thread reads the rows
    in    the thread fills the rows ─► last step's event ─► one copy ─► scatter kernel ─► event ─► they are in the pool

A *lane* is what one thread has at a time: as many rows in pinned memory and in device memory, and a copy stream of its
own. There are few, so staging is bounded; a thread waits for a free one. A lane is held while rows are filled or read,
never while a peer is waited for. The device thread has no part in any of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from torch import Tensor

from engine.device_streams import CopyStreams, open_streams
from engine.transfer.block_io import Bytes
from kernels.triton.block_transfer import gather_blocks, scatter_blocks

NUM_LANES = 8
LANE_BYTES = 8 << 20


def rows_per_lane(block_bytes: int) -> int:
    return max(1, LANE_BYTES // block_bytes)


def staging_bytes(block_bytes: int) -> int:
    """What staging takes of the device's memory, and as much of the host's."""
    return NUM_LANES * rows_per_lane(block_bytes) * block_bytes


class _Lane:
    """`pinned` uint8 [rows, block_bytes] on the host, `blocks` [rows, ...] on the device."""

    def __init__(self, number: int, num_rows: int, pool: Tensor, block_bytes: int) -> None:
        self.number = number
        self.blocks = torch.empty(num_rows, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        self.flat = self.blocks.view(num_rows, -1).view(torch.uint8)
        self.pinned = torch.empty(num_rows, block_bytes, dtype=torch.uint8, pin_memory=pool.device.type == "cuda")
        self.rows: Bytes = self.pinned.numpy()
        self._host_ids = torch.empty(num_rows, dtype=torch.int64, pin_memory=pool.device.type == "cuda")
        self._ids = torch.empty(num_rows, dtype=torch.int64, device=pool.device)

    def ids(self, block_ids: Sequence[int]) -> Tensor:
        """int64 [n] on the device, behind what is queued: out of pageable memory the thread would spin until then."""
        num_rows = len(block_ids)
        self._host_ids.numpy()[:num_rows] = block_ids
        _copy(self._host_ids[:num_rows], self._ids[:num_rows])
        return self._ids[:num_rows]


class Staging:
    """Of `pool` [num_blocks, ...], each block contiguous. Thread-safe."""

    are_rows_the_pool = False

    def __init__(self, pool: Tensor, streams: CopyStreams | None = None) -> None:
        self.block_bytes = pool[0].numel() * pool.element_size()
        self.most = rows_per_lane(self.block_bytes)
        self._pool = pool
        self._flat = pool.view(pool.shape[0], -1).view(torch.uint8)
        self._streams = open_streams(pool.device, NUM_LANES) if streams is None else streams
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        for number in range(NUM_LANES):
            self._lanes.put(_Lane(number, self.most, pool, self.block_bytes))

    @property
    def num_busy(self) -> int:
        """Lanes that some thread has."""
        return NUM_LANES - self._lanes.qsize()

    def step_launched(self) -> None:
        """On the device thread: copies that are asked for from now on wait for what was launched so far."""
        self._streams.mark()

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[Sequence[Bytes]]:
        with self._lane(len(block_ids)) as lane:
            self._streams.run(lane.number, lambda: self._copy_out(lane, block_ids))
            yield list(lane.rows[: len(block_ids)])

    @contextmanager
    def writing(self, block_ids: Sequence[int]) -> Iterator[Sequence[Bytes]]:
        with self._lane(len(block_ids)) as lane:
            yield list(lane.rows[: len(block_ids)])
            self._streams.run(lane.number, lambda: self._copy_in(lane, block_ids))

    @contextmanager
    def writing_part(self, block_id: int, offset: int, num_bytes: int) -> Iterator[Bytes]:
        with self._lane(1) as lane:
            yield lane.rows[0, :num_bytes]
            part, source = self._flat[block_id, offset : offset + num_bytes], lane.pinned[0, :num_bytes]
            self._streams.run(lane.number, lambda: _copy(source, part))

    def close(self) -> None:
        """Lets go of the memory. Raises AssertionError if somebody has a lane: he would write into freed memory."""
        if self.num_busy:
            raise AssertionError(f"{self.num_busy} staging lanes are held by somebody")
        self._pool = self._flat = torch.empty(0)
        self._lanes = SimpleQueue()

    @contextmanager
    def _lane(self, num_rows: int) -> Iterator[_Lane]:
        if num_rows > self.most:
            raise ValueError(f"{num_rows} blocks at once, at most {self.most}")
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def _copy_out(self, lane: _Lane, block_ids: Sequence[int]) -> None:
        num_rows = len(block_ids)
        gather_blocks(self._pool, lane.ids(block_ids), lane.blocks)
        _copy(lane.flat[:num_rows], lane.pinned[:num_rows])

    def _copy_in(self, lane: _Lane, block_ids: Sequence[int]) -> None:
        num_rows = len(block_ids)
        _copy(lane.pinned[:num_rows], lane.flat[:num_rows])
        scatter_blocks(lane.blocks[:num_rows], self._pool, lane.ids(block_ids))


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
