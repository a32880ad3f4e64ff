"""Whole blocks out of the pool into one buffer, back, and from block to block: for transfer, tiers, copy-on-write.

    blocks [num_blocks, ...] with each block contiguous (block-major: all its cells are one piece)
    buffer [n, ...], contiguous; buffer[i] is blocks[block_ids[i]], block_ids int64 [n]

Moves bytes, 8 at a time, with 64-bit offsets. A program copies one piece of one block.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 2048  # 16 KiB a program: 8 warps x 32 lanes x 4 accesses of 16 bytes


@triton.jit
def _copy_kernel(source, target, source_ids, target_ids, stride_source, stride_target, num_words, WORDS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    source_row = tl.load(source_ids + index)
    target_row = tl.load(target_ids + index)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < num_words
    moved = tl.load(source + source_row * stride_source + word, mask=inside)
    tl.store(target + target_row * stride_target + word, moved, mask=inside)


def gather_blocks(blocks: Tensor, block_ids: Tensor, buffer: Tensor) -> None:
    """buffer[i] = blocks[block_ids[i]]. Raises ValueError."""
    _copy(blocks, buffer, block_ids, torch.arange(block_ids.shape[0], device=blocks.device))


def scatter_blocks(buffer: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    """blocks[block_ids[i]] = buffer[i]; ids are distinct. Raises ValueError."""
    _copy(buffer, blocks, torch.arange(block_ids.shape[0], device=blocks.device), block_ids)


def copy_blocks(blocks: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """blocks[dst] = blocks[src] for each (src, dst), in order: a launch for each run of copies that can go at once."""
    run: list[tuple[int, int]] = []
    for source, target in copies:
        if any(target in pair or source == pair[1] for pair in run):
            _copy_pairs(blocks, run)
            run = []
        run.append((source, target))
    if run:
        _copy_pairs(blocks, run)


def _copy_pairs(blocks: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    ids = torch.tensor(pairs, dtype=torch.int64).to(blocks.device).unbind(1)
    _copy(blocks, blocks, ids[0].contiguous(), ids[1].contiguous())


def _copy(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(f"{source.dtype} {tuple(source.shape)} and {target.dtype} {tuple(target.shape)} do not fit")
    if source_ids.shape != target_ids.shape or not source_ids.dtype == target_ids.dtype == torch.int64:
        raise ValueError(f"block ids must be int64 [n], not {source_ids.dtype} and {target_ids.dtype}")
    if source_ids.shape[0] == 0:
        return
    source_words, target_words = _words(source), _words(target)
    num_words = source_words.shape[1]
    _copy_kernel[(source_ids.shape[0], triton.cdiv(num_words, _WORDS))](
        source_words,
        target_words,
        source_ids,
        target_ids,
        source_words.stride(0),
        target_words.stride(0),
        num_words,
        WORDS=_WORDS,
        num_warps=8,
        enable_fp_fusion=False,
    )


def _words(blocks: Tensor) -> Tensor:
    """The blocks as int64 [n, words], without a copy."""
    if not blocks[0].is_contiguous() or blocks[0].numel() * blocks.element_size() % 8:
        raise ValueError(f"blocks {tuple(blocks.shape)} must each be one piece of whole 8-byte words")
    flat = blocks.view(blocks.shape[0], -1)
    return flat.view(torch.int64)
