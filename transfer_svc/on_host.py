"""The bytes of blocks that are about to be sent, on the host."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from engine.transfer.block_io import BlockIo, Bytes
from engine.transfer.copies import copy_out
from engine.transfer.plane import KvPool, is_host_visible
from transfer_svc.peer import InThread
from transfer_svc.sender import BlockRun


@dataclass(frozen=True, slots=True)
class Staging:
    """How blocks of a pool in device memory come to the host, and on which threads."""

    blocks: BlockIo
    in_thread: InThread


async def on_host(
    pool: KvPool, staging: Staging | None, run: BlockRun, check: Callable[[], object]
) -> AsyncGenerator[tuple[BlockRun, Sequence[Bytes]], None]:
    """The run with its blocks' bytes. Those in device memory are copied out, some at a time, and get their checksums
    there. `check` raises if the blocks are not the reader's any more."""
    if is_host_visible(pool):
        yield run, [pool.buffer[block.block_id] for block in run.blocks]
        return
    if staging is None:
        raise ValueError("a pool in device memory needs staging")
    for start in range(0, len(run.blocks), staging.blocks.most):
        some = run.blocks[start : start + staging.blocks.most]
        block_ids = [block.block_id for block in some]
        rows, digests = await staging.in_thread(copy_out, staging.blocks, block_ids)
        check()  # else somebody else may have written there while it was copied
        staged = tuple(replace(block, checksum=digest) for block, digest in zip(some, digests, strict=True))
        yield replace(run, first_block=run.first_block + start, blocks=staged), rows
