"""Hand-made frames are what protobuf makes, and are read back however protobuf may write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.transfer.frames import ZERO_KEY, BlockFrame, FrameError, decode_frame, encode_frame
from pagewire.v1 import transfer_pb2

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
BLOCKS = st.lists(st.tuples(U64, st.binary(min_size=32, max_size=32), st.binary(max_size=300)), min_size=1, max_size=5)


@given(st.binary(max_size=16), U64, U32, U32, U64, BLOCKS)
def test_frame_is_the_protobuf_message(ticket, epoch, group, first_block, offset, blocks):
    checksums, keys, parts = zip(*blocks, strict=True)
    frame = BlockFrame(ticket, epoch, first_block, checksums, keys, b"".join(parts), offset, group)
    message = transfer_pb2.PullResponse(
        frame=transfer_pb2.BlockFrame(
            ticket=ticket,
            epoch=epoch,
            group=group,
            first_block=first_block,
            offset=offset,
            checksums=checksums,
            keys=b"".join(keys),
            payload=b"".join(parts),
        )
    )
    wire = encode_frame(frame)
    assert encode_frame(frame, [memoryview(part) for part in parts]) == wire
    assert transfer_pb2.PullResponse.FromString(wire) == message
    assert decode_frame(wire) == frame
    assert decode_frame(message.SerializeToString()) == frame


def test_fields_may_come_in_any_order():
    key = b"k" * 32
    body = b"\x7a\x03abc" + b"\x20\x07" + b"\x3a\x20" + key + b"\x32\x08" + (9).to_bytes(8, "little")
    frame = decode_frame(b"\x0a" + bytes([len(body)]) + body)
    assert frame == BlockFrame(b"", 0, 7, (9,), (key,), b"abc")


def test_other_events_are_left_to_protobuf():
    for event in (
        transfer_pb2.PullResponse(ready=transfer_pb2.BlocksReady(epoch=1)),
        transfer_pb2.PullResponse(end=transfer_pb2.PullEnd(num_tokens=1)),
        transfer_pb2.PullResponse(),
    ):
        assert decode_frame(event.SerializeToString()) is None


def test_every_truncation_is_refused():
    wire = encode_frame(BlockFrame(b"t" * 16, 3, 2, (1, 2), (ZERO_KEY, ZERO_KEY), b"x" * 40))
    for length in range(1, len(wire)):
        with pytest.raises(FrameError):
            decode_frame(wire[:length])


def test_keys_and_checksums_must_match():
    with pytest.raises(FrameError, match="do not match"):
        decode_frame(encode_frame(BlockFrame(b"t", 1, 0, (1, 2), (ZERO_KEY,), b"x")))
