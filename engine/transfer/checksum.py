"""XXH3-64 of block bytes. xxhash and memmove release the GIL above a few kilobytes, so threads overlap."""

import ctypes

import xxhash


def checksum(data: bytes | memoryview) -> int:
    """XXH3-64 of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_at(address: int, num_bytes: int) -> int:
    """XXH3-64 of `num_bytes` bytes of this process's memory at `address`."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * num_bytes).from_address(address))
