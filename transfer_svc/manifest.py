"""Manifest entries: what the blocks of a ticket are, and the checksums by which a reader verifies its copy."""

from collections.abc import Sequence

from engine.transfer.checksum import checksum
from engine.transfer.plane import KvPool, block_view, is_host_visible
from transfer_svc.ticket import ManifestBlock


def describe_blocks(pool: KvPool, block_ids: Sequence[int], keys: Sequence[bytes]) -> list[ManifestBlock]:
    """Takes as long as a checksum of all the bytes: for transfer threads.

    Blocks in device memory get theirs when they are copied to the host to be sent; until then it is 0.
    """
    is_here = is_host_visible(pool)
    return [
        ManifestBlock(
            block_id, int(pool.generations[block_id]), checksum(block_view(pool, block_id)) if is_here else 0, key
        )
        for block_id, key in zip(block_ids, keys, strict=True)
    ]
