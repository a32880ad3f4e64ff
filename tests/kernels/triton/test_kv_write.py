"""Rotation of q and k, and the writing of k and v.

The rotation is two products and a sum: two or three roundings of float32, one of 16 bits, relative to a pair's length.
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.memory import KvLayout, KvMemory
from kernels import reference
from kernels.triton import kv_write
from kernels.triton.fp8 import CACHE_DTYPE
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import DTYPES, assert_close, random


@dataclass(frozen=True)
class Step:
    """Inputs of one step and what the cache held before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    memory: KvMemory

    @staticmethod
    def make(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> "Step":
        qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)  # views of one matrix product
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        inv_freq = 1.0 / 10000.0 ** (torch.arange(head_dim // 2) * 2 / head_dim)
        cos, sin = reference.rope_tables(torch.arange(num_tokens) * 37, inv_freq, 1.25)
        memory = KvMemory(KvLayout(3, num_kv_heads, head_dim, 16, dtype), num_tokens // 16 + 3)
        memory.blocks.copy_(random(*memory.blocks.shape, dtype=dtype, seed=3))
        order = torch.randperm(memory.num_blocks * 16, generator=torch.Generator().manual_seed(4))
        slots = order[:num_tokens].clone()
        slots[num_tokens // 2] = -1  # a padding row
        return Step(q, k, v, cos, sin, slots, memory)

    def run(self, kernels: ModuleType) -> Tensor:
        caches = self.memory.layer(1)
        rotated: Tensor = kernels.rope_and_write_kv(self.q, self.k, self.v, self.cos, self.sin, *caches, self.slots)
        return rotated


def check(kernels: ModuleType, step: Step) -> None:
    before = step.memory.blocks.clone()
    q = step.run(kernels)
    blocks, offsets = step.slots // 16, step.slots % 16
    written = step.slots >= 0
    k_cache, v_cache = step.memory.layer(1)
    for out, source in ((q, step.q), (k_cache[blocks, :, offsets][written], step.k[written])):
        rows = torch.arange(len(step.q)) if out is q else torch.arange(len(step.q))[written]
        wide = source.double()
        first, second = wide.chunk(2, dim=-1)
        length = (first.square() + second.square()).sqrt().repeat(1, 1, 2) * 1.25
        expected = reference.apply_rope(wide, step.cos[rows], step.sin[rows])
        assert_close(out, expected, roundings=3.0 if out.dtype == torch.float32 else 1.1, scale=length)
    assert torch.equal(v_cache[blocks, :, offsets][written], step.v[written])
    untouched = torch.ones(step.memory.num_blocks, 16, dtype=torch.bool)
    untouched[blocks[written], offsets[written]] = False
    now = step.memory.blocks.permute(0, 4, 1, 2, 3, 5)
    was = before.permute(0, 4, 1, 2, 3, 5)
    assert torch.equal(now[untouched], was[untouched])
    assert torch.equal(now[:, :, [0, 2]], was[:, :, [0, 2]])  # the other layers


@pytest.mark.parametrize("dtype", DTYPES)
def test_float64(dtype: str) -> None:
    for heads in ((1, 1), (4, 1), (7, 1), (16, 2)):
        check(kv_write, Step.make(19, *heads, 64, DTYPES[dtype]))


def test_head_sizes() -> None:
    for head_dim in (80, 96, 128, 256):
        check(kv_write, Step.make(3, 2, 1, head_dim, torch.float32))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("second * c + first * s).to(q_out", "second * c - first * s).to(q_out"),
        ("first * c - second * s, second * c + first * s", "first * c - second * s, second * c - first * s"),
        ("slot % BLOCK_SIZE", "(slot + 1) % BLOCK_SIZE"),
        ("_store(first, second, v,", "_store(first, first, v,"),
        ("token[:, None] * HALF + column", "token[:, None] * 0 + column"),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(mutant(kv_write, old, new, tmp_path), Step.make(19, 4, 1, 64, torch.float32))


def test_a_row_does_not_depend_on_the_others() -> None:
    step = Step.make(19, 4, 2, 80, torch.float32)
    q, together = step.run(kv_write), step.memory.blocks.clone()
    for row in (0, 7, 18):
        rows = slice(row, row + 1)
        alone = Step(
            step.q[rows], step.k[rows], step.v[rows], step.cos[rows], step.sin[rows], step.slots[rows], step.memory
        )
        assert torch.equal(alone.run(kv_write)[0], q[row])
        assert torch.equal(step.memory.blocks, together)


def test_no_tokens() -> None:
    step = Step.make(1, 2, 1, 64, torch.float32)
    empty = Step(step.q[:0], step.k[:0], step.v[:0], step.cos[:0], step.sin[:0], step.slots[:0], step.memory)
    assert empty.run(kv_write).shape == (0, 2, 64)


def test_what_does_not_fit_is_refused() -> None:
    step = Step.make(4, 2, 1, 64, torch.float32)
    with pytest.raises(ValueError, match="slots must be int64"):
        Step(step.q, step.k, step.v, step.cos, step.sin, step.slots.int(), step.memory).run(kv_write)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # rows that aren't finite
@pytest.mark.parametrize(("dtype", "head_dim"), [*((dtype, 64) for dtype in DTYPES), ("bfloat16", 80)])
def test_an_e4m3_cache_is_every_kernel_sets(dtype: str, head_dim: int) -> None:
    """Bytes and scales are those of `QuantizedCells.store` on what a plain cache gets, odd rows included."""
    step = Step.make(19, 4, 2, head_dim, DTYPES[dtype])
    step.k[3], step.v[3], step.v[4] = 0.0, 0.0, step.v[4] * 1e-30
    step.k[5, 0, 7], step.v[6, 1, 2], step.v[7, 1, 2] = torch.nan, torch.inf, -torch.inf
    step.v[8, :, :9] *= 1e-4  # too small beside the others
    step.run(kv_write)
    memory = KvMemory(KvLayout(3, 2, head_dim, 16, DTYPES[dtype], "fp8_e4m3"), step.memory.num_blocks)
    caches = memory.layer(1)
    values = [cells.values.view(CACHE_DTYPE) for cells in caches]
    scales = {"k_scale": caches[0].scales, "v_scale": caches[1].scales}
    kv_write.rope_and_write_kv(step.q, step.k, step.v, step.cos, step.sin, *values, step.slots, **scales)
    expected = KvMemory(memory.layout, memory.num_blocks)
    written = step.slots[step.slots >= 0]
    blocks, offsets = written // 16, written % 16
    for plain, cells in zip(step.memory.layer(1), expected.layer(1), strict=True):
        cells.store(plain[blocks, :, offsets], blocks, offsets)
    for ours, right in zip(caches, expected.layer(1), strict=True):
        assert torch.equal(ours.values, right.values)
        assert torch.equal(ours.scales.nan_to_num(nan=-1.0), right.scales.nan_to_num(nan=-1.0))
    assert torch.equal(memory.blocks[:, [0, 2]], expected.blocks[:, [0, 2]])
    with pytest.raises(ValueError, match="v_scale of an e4m3 cache must be float32"):
        kv_write.rope_and_write_kv(
            step.q, step.k, step.v, step.cos, step.sin, *values, step.slots, k_scale=scales["k_scale"]
        )
