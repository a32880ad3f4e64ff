"""Slots in this process's memory. Pages are taken from the system only when a slot is first written."""

import mmap
from collections.abc import Callable

import numpy as np

from engine.tiers.tier import Bytes
from engine.transfer.checksum import checksum
from kvstore.tier_block import Entry


class HostSlots:
    """`num_slots` slots of `block_bytes` bytes."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        mapping = mmap.mmap(-1, num_slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer: Bytes = np.frombuffer(mapping, np.uint8).reshape(num_slots, block_bytes)

    def write(self, entry: Entry, source: Bytes) -> int:
        slot = self.buffer[entry.slot]
        slot[:] = source
        return checksum(slot.data)

    def seal(self, entry: Entry, checksum: int) -> None:
        """Memory needs no seal."""

    def read(self, entry: Entry, target: Bytes) -> None:
        target[:] = self.buffer[entry.slot]

    def erase(self, is_live: Callable[[bytes], bool]) -> None:
        """No later process sees this memory."""

    def close(self) -> None:
        self.buffer = np.empty((0, 0), np.uint8)
