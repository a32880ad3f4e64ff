"""XXH3-64 of block bytes. xxhash and memmove release the GIL above a few kilobytes, so threads overlap."""

import ctypes
from functools import lru_cache
from typing import Any

import xxhash


def checksum(data: bytes | memoryview) -> int:
    """XXH3-64 of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_at(address: int, num_bytes: int) -> int:
    """XXH3-64 of `num_bytes` bytes of this process's memory at `address`."""
    return xxhash.xxh3_64_intdigest(_array_type(num_bytes).from_address(address))


@lru_cache(64)
def _array_type(num_bytes: int) -> Any:
    """Making it takes as long as the checksum of 4 KiB."""
    return ctypes.c_char * num_bytes
