"""The bytes of a disk tier's file, version 2; integers are little-endian.

    file    header (4096 bytes), then slots of equal size, as many as have been used so far
    header  "PWKVTIER" · version u32 · block size u32 · block bytes u64 · fingerprint (32) · XXH3-64 of all before
    slot    record (a multiple of 512 bytes), then the block's bytes
    record  "PWKVBLCK" · name (32) · parent's name (32, zero for a chain's first block) · owner (16) · KV group u32
            · checksum of the block u64 · tokens u32 each · XXH3-64 of all before

A record is zeroed before its slot is written again and is written last, so a process that is killed leaves a slot that
is whole or empty. What the system loses after a power cut the checksums find. The fingerprint names everything on which
a block's bytes depend.
"""

import hashlib
import struct

import numpy as np

from engine.transfer.checksum import checksum
from kvstore.hashing import KEY_BYTES
from kvstore.tier_block import OWNER_BYTES, TierBlock

KV_VERSION = 4
"""Raised with each change of a kernel or model after which tokens have other values. It is in the root of all block
keys: no KV that the code before has computed is used, be it stored or another worker's."""
FILE_HEADER_BYTES = 4096
NO_RECORD = bytes(8)
_FILE_MAGIC, _RECORD_MAGIC = b"PWKVTIER", b"PWKVBLCK"
_VERSION = 2
_FILE = struct.Struct("<8sIIQ32s")
_RECORD = struct.Struct(f"<8s{KEY_BYTES}s{KEY_BYTES}s{OWNER_BYTES}sIQ")
_DIGEST = struct.Struct("<Q")
_NO_PARENT = bytes(KEY_BYTES)


def fingerprint(root: bytes, layout_id: str, numerics_class: str, torch_version: str) -> bytes:
    """32 bytes; equal where blocks may be exchanged and give the same tokens, bit for bit.

    Torch's version is none of it where the native kernels compute all that matters.
    """
    digest = hashlib.sha256(b"pw-tier-5")
    torch_part = "" if "/native/" in numerics_class else torch_version
    for part in (root, layout_id.encode(), numerics_class.encode(), torch_part.encode()):
        digest.update(struct.pack("<I", len(part)) + part)
    return digest.digest()


def file_header(fingerprint: bytes, block_size: int, block_bytes: int) -> bytes:
    """What the file begins with; a file that begins with anything else is another's."""
    fields = _FILE.pack(_FILE_MAGIC, _VERSION, block_size, block_bytes, fingerprint)
    return (fields + _DIGEST.pack(checksum(fields))).ljust(FILE_HEADER_BYTES, b"\0")


def record_bytes(block_size: int) -> int:
    """Size of a slot's record."""
    return -(-(_RECORD.size + 4 * block_size + _DIGEST.size) // 512) * 512


def encode_record(block: TierBlock, block_checksum: int) -> bytes:
    parent = _NO_PARENT if block.parent is None else block.parent
    fields = _RECORD.pack(_RECORD_MAGIC, block.key, parent, block.owner, block.group, block_checksum)
    fields += np.asarray(block.token_ids, "<u4").tobytes()
    return (fields + _DIGEST.pack(checksum(fields))).ljust(record_bytes(len(block.token_ids)), b"\0")


def decode_record(record: bytes, block_size: int) -> tuple[TierBlock, int] | None:
    """The block and its checksum; None if the slot is empty or the record is not whole."""
    end = _RECORD.size + 4 * block_size
    if len(record) < end + _DIGEST.size or not record.startswith(_RECORD_MAGIC):
        return None
    if _DIGEST.unpack_from(record, end)[0] != checksum(record[:end]):
        return None
    _, key, parent, owner, group, block_checksum = _RECORD.unpack_from(record)
    tokens = tuple(np.frombuffer(record, "<u4", block_size, _RECORD.size).tolist())
    return TierBlock(key, None if parent == _NO_PARENT else parent, tokens, owner, group), block_checksum
