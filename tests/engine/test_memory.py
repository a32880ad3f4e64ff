"""The KV pool: the order of its bytes, its views, and what a peer sees of it."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.memory import Backing, KvLayout, KvMemory

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
BACKINGS: list[Backing] = ["private", "memfd"]


@pytest.fixture(params=BACKINGS)
def memory(request: pytest.FixtureRequest) -> Iterator[KvMemory]:
    memory = KvMemory(LAYOUT, 5, request.param)
    yield memory
    memory.close()


def resident_bytes(buffer: NDArray[np.uint8]) -> int:
    """Of its pages, by the kernel's own table."""
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(buffer.ctypes.data // mmap.PAGESIZE * 8)
        entries = np.frombuffer(table.read(buffer.nbytes // mmap.PAGESIZE * 8), dtype=np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * mmap.PAGESIZE


def test_block_bytes_and_layout_id() -> None:
    assert LAYOUT.block_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert LAYOUT.layout_id == "canonical/l3.h2.b4.d8/float32"
    assert KvLayout(3, 2, 8, 4, torch.bfloat16).block_bytes * 2 == LAYOUT.block_bytes


def test_a_layer_is_a_view_of_the_blocks(memory: KvMemory) -> None:
    """Block-major: cells (layer, K or V, kv head) of one block lie one after another, [block_size, head_dim] each."""
    k, v = memory.layer(1)
    assert k.shape == v.shape == (5, 2, 4, 8)
    k[4, 1, 3, 7], v[4, 0, 0, 0] = 1.5, 2.5
    block = memory.buffer[4].view(np.float32)
    cell = 4 * 8
    assert block[(1 * 4 + 0 * 2 + 1) * cell + 3 * 8 + 7] == 1.5
    assert block[(1 * 4 + 1 * 2 + 0) * cell] == 2.5
    assert np.count_nonzero(memory.buffer.view(np.float32)) == 2


def test_fresh_memory_is_finite(memory: KvMemory) -> None:
    assert not memory.buffer.any()
    assert memory.buffer.flags.writeable
    assert not memory.generations.any()


def test_copy_block(memory: KvMemory) -> None:
    memory.buffer[1] = np.arange(LAYOUT.block_bytes) % 251
    memory.copy_block(1, 3)
    assert (memory.buffer[3] == memory.buffer[1]).all()
    assert not memory.buffer[[0, 2, 4]].any()


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_prefaulted_memory_is_there_and_all_zero(backing: Backing, num_threads: int) -> None:
    memory = KvMemory(LAYOUT, 8_192, backing)
    assert resident_bytes(memory.buffer) == 0
    memory.prefault(num_threads)
    assert resident_bytes(memory.buffer) == memory.buffer.nbytes
    assert not memory.buffer.any()
    memory.close()


def test_address_is_that_of_the_buffer(memory: KvMemory) -> None:
    memory.buffer[2, :3] = (7, 8, 9)
    memory.generations[3] = 2**63
    import ctypes

    assert ctypes.string_at(memory.address + 2 * LAYOUT.block_bytes, 3) == bytes((7, 8, 9))
    assert ctypes.c_uint64.from_address(memory.generations_address + 3 * 8).value == 2**63


def test_a_memfd_shows_the_same_bytes_to_a_peer() -> None:
    memory = KvMemory(LAYOUT, 5, "memfd")
    assert memory.fd is not None
    assert memory.generations_fd is not None
    memory.buffer[4, -1] = 77
    memory.generations[1] = 5
    with mmap.mmap(memory.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as peer:
        assert peer[5 * LAYOUT.block_bytes - 1] == 77
    with mmap.mmap(memory.generations_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as peer:
        assert peer[8] == 5
    memory.close()


def test_private_memory_has_no_file() -> None:
    memory = KvMemory(LAYOUT, 5)
    assert (memory.fd, memory.generations_fd) == (None, None)


def test_close_gives_everything_back(memory: KvMemory) -> None:
    descriptors = [fd for fd in (memory.fd, memory.generations_fd) if fd is not None]
    address = memory.address
    memory.close()
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert memory.fd is None
    with open("/proc/self/maps") as maps:
        assert not any(int(line.split("-")[0], 16) == address for line in maps)
    memory.close()  # a second time is no harm
