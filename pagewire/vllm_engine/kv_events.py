"""The journal of a prefix cache as KvEventBatch messages: live, from a cursor, or as a snapshot in chunks."""

from collections.abc import Iterable, Iterator, Sequence

from pagewire.foreign.smg import common_pb2 as pb
from pagewire.kv_journal import Batch, Block, Cleared, Stored

# About 100 bytes each with 16 tokens a block.
BLOCKS_PER_CHUNK = 4096


def block_hash(key: bytes) -> int:
    """A key as a signed 64-bit number; followers use it as a name only."""
    return int.from_bytes(key[:8], "big", signed=True)


def batch_to_proto(batch: Batch) -> pb.KvEventBatch:
    """Its changes in order."""
    message = pb.KvEventBatch(sequence_number=batch.seq, dp_rank=0)
    for change in batch.changes:
        if isinstance(change, Stored):
            message.events.extend(_stored(change.blocks))
        elif isinstance(change, Cleared):
            message.events.add(cleared=pb.KvCacheCleared())
        else:
            removed = pb.KvBlocksRemoved(block_hashes=map(block_hash, change.keys), tier=pb.KV_CACHE_TIER_DEVICE)
            message.events.add(removed=removed)
    for event_id, event in enumerate(message.events):
        event.event_id = event_id
    return message


def snapshot_to_proto(seq: int, blocks: Sequence[Block]) -> Iterator[pb.KvEventBatch]:
    """At least one chunk, so that a follower of an empty cache has a cursor too; the last one is numbered `seq`."""
    count = max(1, -(-len(blocks) // BLOCKS_PER_CHUNK))
    for index in range(count):
        chunk = blocks[index * BLOCKS_PER_CHUNK : (index + 1) * BLOCKS_PER_CHUNK]
        message = pb.KvEventBatch(sequence_number=seq - count + 1 + index, dp_rank=0)
        message.snapshot.index, message.snapshot.count, message.snapshot.blocks = index, count, len(blocks)
        if index == 0:
            message.events.add(cleared=pb.KvCacheCleared())
        message.events.extend(_stored(chunk))
        yield message


def _stored(blocks: Iterable[Block]) -> Iterator[pb.KvCacheEvent]:
    """One event for each run of blocks that follow each other."""
    run: list[Block] = []
    for block in blocks:
        if run and (block.parent, block.cache_salt, block.adapter) != (
            run[-1].key,
            run[-1].cache_salt,
            run[-1].adapter,
        ):
            yield _run(run)
            run = []
        run.append(block)
    if run:
        yield _run(run)


def _run(blocks: Sequence[Block]) -> pb.KvCacheEvent:
    first = blocks[0]
    stored = pb.KvBlocksStored(
        blocks=[
            pb.KvBlock(block_hash=block_hash(b.key), token_ids=b.token_ids, block_size=len(b.token_ids)) for b in blocks
        ],
        tier=pb.KV_CACHE_TIER_DEVICE,
        group_idx=0,
        locality=pb.KV_CACHE_LOCALITY_LOCAL,
    )
    if first.parent is not None:
        stored.parent_block_hash = block_hash(first.parent)
    if first.cache_salt:
        stored.cache_salt = first.cache_salt
    if first.adapter:
        stored.lora_name = first.adapter
    return pb.KvCacheEvent(stored=stored)
