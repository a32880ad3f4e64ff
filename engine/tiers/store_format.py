"""The bytes of a block in a shared store: one value, so it is there whole or not at all.

    value   "PWKVSTO2" · fingerprint (32) · a record as on disk (`disk_format`) · the block's bytes

A value says by itself whose it is, what it holds and whether it is whole; whoever reads one believes nothing else.
"""

from engine.tiers.disk_format import decode_record, encode_record, record_bytes
from engine.tiers.tier import Bytes
from engine.transfer.checksum import checksum
from kvstore.tier_block import TierBlock

_MAGIC = b"PWKVSTO2"


class StoreFormat:
    """For blocks of `block_size` tokens and `block_bytes` bytes of one 32-byte fingerprint."""

    def __init__(self, fingerprint: bytes, block_size: int, block_bytes: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._begin = _MAGIC + fingerprint
        self.head_bytes = len(self._begin) + record_bytes(block_size)

    @property
    def value_bytes(self) -> int:
        return self.head_bytes + self.block_bytes

    def encode(self, block: TierBlock, source: Bytes) -> bytes:
        """The value, with the checksum of its own copy of `source`."""
        copy = source.tobytes()
        return b"".join((self._begin, encode_record(block, checksum(copy)), copy))

    def decode_head(self, head: bytes) -> tuple[TierBlock, int] | None:
        """The block and its checksum from the first `head_bytes` bytes of a value; None if that is something else."""
        if not head.startswith(self._begin):
            return None
        return decode_record(head[len(self._begin) : self.head_bytes], self.block_size)

    def block_of(self, key: bytes, head: bytes) -> TierBlock | None:
        """The block `key` by the first bytes of its value; None if they are another's, or none of a block."""
        decoded = self.decode_head(head)
        return None if decoded is None or decoded[0].key != key else decoded[0]

    def copy(self, value: bytes, key: bytes, token_ids: tuple[int, ...], target: Bytes) -> str:
        """Copies the block into `target`. Returns what is not right about it, empty if all is: only then use it."""
        decoded = self.decode_head(value)
        if decoded is None or len(value) != self.value_bytes:
            return f"{len(value)} bytes that are no block of this model, layout and machine"
        block, digest = decoded
        if block.key != key or block.token_ids != token_ids:
            return f"it is block {block.key.hex()[:16]}"
        target[:] = memoryview(value)[self.head_bytes :]
        found = checksum(target.data)
        return "" if found == digest else f"the copy has checksum {found:016x}, stored was {digest:016x}"
