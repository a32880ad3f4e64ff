"""The wire bytes of PullResponse{BlockFrame}, written and read by hand so that tensors never pass through protobuf.

    PullResponse   0A <length> BlockFrame                        field 1, the only field
    BlockFrame     0A 10 ticket · 10 epoch · 18 group · 20 first_block · 28 offset
                   32 <8n> checksums (packed, little endian) · 3A <32n> keys · 7A <length> payload

The payload is the last field of the last field: a frame is one small header followed by the pool's bytes. Any protobuf
client parses it; the reader here takes fields in any order, as protobuf allows.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KEY_BYTES = 32
ZERO_KEY = bytes(KEY_BYTES)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FRAME_TAG = 1 << 3 | _BYTES
_PAYLOAD_TAG = 15 << 3 | _BYTES


class FrameError(Exception):
    """Bytes that are no frame."""


@dataclass(frozen=True, slots=True)
class BlockFrame:
    """Consecutive whole blocks, or a part of one block that is larger than a frame.

    `keys` has one entry per block, `ZERO_KEY` for a partial last block; `checksums` one XXH3-64 per block (or part).
    """

    ticket: bytes
    epoch: int
    first_block: int
    checksums: tuple[int, ...]
    keys: tuple[bytes, ...]
    payload: bytes | memoryview
    offset: int = 0
    group: int = 0


def encode_frame(frame: BlockFrame, parts: Sequence[bytes | memoryview] | None = None) -> bytes:
    """The serialized PullResponse. `parts`, if given, are the payload's pieces (blocks that lie apart in the pool)."""
    pieces: Sequence[bytes | memoryview] = [frame.payload] if parts is None else parts
    payload_bytes = sum(len(piece) for piece in pieces)
    num_blocks = len(frame.checksums)
    body = b"".join(
        (
            _bytes_field(1, frame.ticket),
            _varint_field(2, frame.epoch),
            _varint_field(3, frame.group),
            _varint_field(4, frame.first_block),
            _varint_field(5, frame.offset),
            _bytes_field(6, struct.pack(f"<{num_blocks}Q", *frame.checksums)),
            _bytes_field(7, b"".join(frame.keys)),
            bytes((_PAYLOAD_TAG,)),
            _varint(payload_bytes),
        )
    )
    return b"".join((bytes((_FRAME_TAG,)), _varint(len(body) + payload_bytes), body, *pieces))


def decode_frame(message: bytes) -> BlockFrame | None:
    """The frame in a serialized PullResponse, its payload a view of `message`; None if it holds another event."""
    view = memoryview(message)
    if not message or message[0] != _FRAME_TAG:
        return None
    outer = list(_fields(view))
    if len(outer) != 1 or not isinstance(outer[0][1], memoryview):
        raise FrameError(f"a frame must be the only field of its message, found fields {[n for n, _ in outer]}")
    numbers: dict[int, int] = {}
    blobs: dict[int, memoryview] = {}
    for number, value in _fields(outer[0][1]):
        if isinstance(value, int):
            numbers[number] = value
        else:
            blobs[number] = value
    packed, keys = blobs.get(6, view[:0]), bytes(blobs.get(7, b""))
    if len(packed) % 8 or len(keys) != len(packed) // 8 * KEY_BYTES or not len(packed):
        raise FrameError(f"{len(packed)} bytes of checksums and {len(keys)} bytes of keys do not match")
    return BlockFrame(
        ticket=bytes(blobs.get(1, b"")),
        epoch=numbers.get(2, 0),
        group=numbers.get(3, 0),
        first_block=numbers.get(4, 0),
        offset=numbers.get(5, 0),
        checksums=struct.unpack(f"<{len(packed) // 8}Q", packed),
        keys=tuple(keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)),
        payload=blobs.get(15, view[:0]),
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return bytes((number << 3 | _VARINT,)) + _varint(value) if value else b""


def _bytes_field(number: int, value: bytes) -> bytes:
    return bytes((number << 3 | _BYTES,)) + _varint(len(value)) + value if value else b""


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(view) or shift > 63:
            raise FrameError("a truncated or overlong varint")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, varint value or the field's bytes) of each field of a message."""
    position = 0
    while position < len(view):
        tag, position = _read_varint(view, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _read_varint(view, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, position = _read_varint(view, position)
        elif kind == _FIXED64:
            length = 8
        elif kind == _FIXED32:
            length = 4
        else:
            raise FrameError(f"wire type {kind} is not used here")
        if position + length > len(view):
            raise FrameError(f"field {tag >> 3} needs {length} bytes, {len(view) - position} are left")
        yield tag >> 3, view[position : position + length]
        position += length
