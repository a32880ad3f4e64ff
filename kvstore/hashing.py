"""Block keys: what a KV block holds, as 32 bytes that every process and language computes alike (DESIGN §5).

    root  = sha256( 01 "pw-root-1" · 02 weights digest · 03 config · 04 compute dtype · 05 kv dtype
                    · 06 quantization · 07 block size (u32) · 08 group layout · 09 KV version (u32) )
    key_0 = sha256( 01 "pw-blk-1" · 10 root · 11 cache salt · 12 adapter key · 14 tokens of block 0 )
    key_i = sha256( 01 "pw-blk-1" · 10 key_{i-1} · 14 tokens of block i )
    adapter key = sha256( 01 "pw-lora-1" · 20 content digest · 21 load generation (u64) ), or empty for the base model

Each field is written as tag byte (in hex above), length (u32), bytes, in this order, empty ones too. Integers are
little-endian, tokens are u32 each, text is UTF-8. Tag 13 is reserved for media (digest, offset), one field per medium,
before the tokens. `config` is JSON with sorted keys, no spaces, ASCII only, floats as Python's `repr` writes them, no
NaN or infinity.
Golden vectors: `protos/pagewire/v1/block_keys.json`.
"""

import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence

_DOMAIN = 0x01
_WEIGHTS, _CONFIG, _COMPUTE_DTYPE, _KV_DTYPE, _QUANTIZATION, _BLOCK_SIZE, _GROUP_LAYOUT, _KV_VERSION = range(0x02, 0x0A)
_PARENT, _CACHE_SALT, _ADAPTER = 0x10, 0x11, 0x12
_TOKENS = 0x14
_ADAPTER_CONTENT, _ADAPTER_GENERATION = 0x20, 0x21

KEY_BYTES = 32
INDEX_KEY_BYTES = 16


def _field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def canonical_json(config: Mapping[str, object]) -> bytes:
    """`config` in the one spelling that is hashed. Raises ValueError for NaN, TypeError for what JSON cannot hold."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def root_key(
    *,
    weights_digest: bytes,
    kv_config: Mapping[str, object],
    compute_dtype: str,
    kv_dtype: str,
    quantization: str,
    block_size: int,
    group_layout: str,
    kv_version: int,
) -> bytes:
    """The 32-byte root: two workers have equal roots if and only if their KV values may be exchanged.

    `kv_version` is that of the code which computes them: of two releases side by side in a rolling upgrade too.
    """
    digest = hashlib.sha256(_field(_DOMAIN, b"pw-root-1"))
    digest.update(_field(_WEIGHTS, weights_digest))
    digest.update(_field(_CONFIG, canonical_json(kv_config)))
    digest.update(_field(_COMPUTE_DTYPE, compute_dtype.encode()))
    digest.update(_field(_KV_DTYPE, kv_dtype.encode()))
    digest.update(_field(_QUANTIZATION, quantization.encode()))
    digest.update(_field(_BLOCK_SIZE, struct.pack("<I", block_size)))
    digest.update(_field(_GROUP_LAYOUT, group_layout.encode()))
    digest.update(_field(_KV_VERSION, struct.pack("<I", kv_version)))
    return digest.digest()


def adapter_key(digest: bytes, generation: int) -> bytes:
    """What block keys have of one load of an adapter, 32 bytes."""
    key = hashlib.sha256(_field(_DOMAIN, b"pw-lora-1"))
    key.update(_field(_ADAPTER_CONTENT, digest))
    key.update(_field(_ADAPTER_GENERATION, struct.pack("<Q", generation)))
    return key.digest()


def block_keys(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    *,
    cache_salt: str = "",
    adapter: bytes = b"",
    parent: bytes | None = None,
) -> list[bytes]:
    """Keys (32 bytes) of the full blocks of `token_ids`, in order; a partial last block has none.

    `adapter` is an `adapter_key`. With `parent`, the key of the block before, `token_ids` continue that chain; salt and
    adapter are already in it.
    """
    num_blocks = len(token_ids) // block_size
    if not num_blocks:
        return []
    tokens = _token_bytes(token_ids[: num_blocks * block_size])
    width = 4 * block_size
    domain, tokens_header = _field(_DOMAIN, b"pw-blk-1"), struct.pack("<BI", _TOKENS, width)
    between = b""
    if parent is None:
        parent = root
        between = _field(_CACHE_SALT, cache_salt.encode()) + _field(_ADAPTER, adapter)
    keys = []
    for start in range(0, len(tokens), width):
        parent = hashlib.sha256(
            domain + _field(_PARENT, parent) + between + tokens_header + tokens[start : start + width]
        ).digest()
        between = b""
        keys.append(parent)
    return keys


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """u32 each. An array and not numpy's: the router has no other use for that, which would be 20 MB of it."""
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def index_key(key: bytes) -> bytes:
    """The part of a key that the prefix index carries."""
    return key[:INDEX_KEY_BYTES]
