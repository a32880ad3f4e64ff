"""Manifest entries: what the blocks of a ticket are, and the checksums by which a reader verifies its copy."""

from collections.abc import Sequence

from engine.transfer.checksum import checksum
from engine.transfer.plane import KvPool, block_view
from transfer_svc.leases import ManifestBlock


def describe_blocks(pool: KvPool, block_ids: Sequence[int], keys: Sequence[bytes]) -> list[ManifestBlock]:
    """Takes as long as a checksum of all the bytes: for transfer threads."""
    return [
        ManifestBlock(block_id, int(pool.generations[block_id]), checksum(block_view(pool, block_id)), key)
        for block_id, key in zip(block_ids, keys, strict=True)
    ]
