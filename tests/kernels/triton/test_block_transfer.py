"""Blocks out of the pool and back: every byte, and no other one."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.memory import KvLayout, KvMemory
from kernels import reference
from kernels.triton import block_transfer
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import random


def pool(num_blocks: int = 7, *, num_layers: int = 9, seed: int = 0) -> Tensor:
    """Blocks of 18,432 bytes: more than a program's piece, and not a whole number of them."""
    memory = KvMemory(KvLayout(num_layers, 1, 32, 16, torch.bfloat16), num_blocks)
    memory.blocks.copy_(random(*memory.blocks.shape, dtype=torch.bfloat16, seed=seed))
    return memory.blocks


def check(kernels: ModuleType, blocks: Tensor, ids: list[int]) -> None:
    block_ids = torch.tensor(ids, dtype=torch.int64)
    buffer = torch.full((len(ids) + 1, *blocks.shape[1:]), 7.0, dtype=blocks.dtype)
    before = blocks.clone()
    kernels.gather_blocks(blocks, block_ids, buffer)
    assert torch.equal(buffer[:-1], before[block_ids])
    assert bool((buffer[-1] == 7.0).all())
    assert torch.equal(blocks, before)
    other = pool(blocks.shape[0], num_layers=blocks.shape[1], seed=1)
    expected = other.clone()
    expected[block_ids] = before[block_ids]
    kernels.scatter_blocks(buffer[:-1], other, block_ids)
    assert torch.equal(other, expected)


@pytest.mark.parametrize("ids", [[], [3], [6, 0, 2, 5]])
@pytest.mark.parametrize("num_layers", [1, 9])
def test_gather_and_scatter(ids: list[int], num_layers: int) -> None:
    check(block_transfer, pool(num_layers=num_layers), ids)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.program_id(1) * WORDS", "0 * WORDS"),
        ("source_row * stride_source", "target_row * stride_source"),
        ("inside = word < num_words", "inside = word < num_words - 1"),
        ("inside = word < num_words", "inside = word < num_words + 1"),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(mutant(block_transfer, old, new, tmp_path), pool(), [4, 1])


@pytest.mark.parametrize("copies", [[], [(0, 1)], [(0, 1), (2, 3)], [(0, 1), (1, 2), (2, 0)], [(0, 1), (2, 1), (3, 0)]])
def test_copies_happen_in_order(copies: list[tuple[int, int]]) -> None:
    blocks, expected = pool(), pool()
    block_transfer.copy_blocks(blocks, copies)
    reference.copy_blocks(expected, copies)
    assert torch.equal(blocks, expected)


def test_what_does_not_fit_is_refused() -> None:
    blocks = pool()
    with pytest.raises(ValueError, match="block ids must be int64"):
        block_transfer.gather_blocks(blocks, torch.zeros(1, dtype=torch.int32), torch.empty_like(blocks[:1]))
    with pytest.raises(ValueError, match="must each be one piece"):
        block_transfer.gather_blocks(
            blocks.transpose(1, 2), torch.zeros(1, dtype=torch.int64), torch.empty_like(blocks[:1].transpose(1, 2))
        )
