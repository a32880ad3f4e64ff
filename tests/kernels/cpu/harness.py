"""Shared pieces of the native kernels' tests: every instruction set in turn, bitwise comparison, paged sequences."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import kernels.cpu
from kernels.cpu.native import NativeKernels
from kernels.paged import PagedBatch

ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "amx_emulated")
DTYPES = (torch.float32, torch.bfloat16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Half a unit in the last place of 1: the relative error of one rounding."""


def kernels_for(isa: str) -> NativeKernels:
    """The kernel set on `isa`; skips the test where that can't run."""
    if kernels.cpu.why_unavailable():
        pytest.skip(kernels.cpu.why_unavailable())
    extension = kernels.cpu.load()
    obstacles = {name: obstacle for name, obstacle, _ in extension.module.isas()}
    obstacle = obstacles.get(isa, "this build leaves it out")
    if obstacle:
        pytest.skip(f"{isa}: {obstacle}")
    extension.module.use(isa)
    return NativeKernels(kernels.cpu.Extension(extension.module, isa))


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    """Equal to the bit, the sign of a zero included."""
    assert left.shape == right.shape
    integer = torch.int32 if left.dtype == torch.float32 else torch.int16
    differing = (left.contiguous().view(integer) != right.contiguous().view(integer)).nonzero()
    assert not len(differing), f"{len(differing)} of {left.numel()} elements differ, first at {differing[0].tolist()}"


def assert_within(result: Tensor, expected: Tensor, bound: Tensor) -> None:
    """|result - expected| <= bound, elementwise in float64; expected and bound are float64."""
    excess = (result.double() - expected).abs() / bound
    assert excess.max() <= 1.0, f"the worst error is {excess.max():.2f} times its bound"


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Names one of a test's cases when it fails."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"case {values}: {error}") from error


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Reproducible normal numbers."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's keys and values of some sequences in shuffled blocks, as views of a block-major pool."""

    k: Tensor
    v: Tensor
    tables: tuple[tuple[int, ...], ...]
    block_size: int

    def batch(
        self, query_lens: Sequence[int], kv_lens: Sequence[int], which: Sequence[int] | None = None
    ) -> PagedBatch:
        tables = self.tables if which is None else [self.tables[i] for i in which]
        return PagedBatch.build(
            query_lens,
            kv_lens,
            [t[: -(-n // self.block_size)] for t, n in zip(tables, kv_lens, strict=True)],
            self.block_size,
        )


def make_cache(
    kv_lens: Sequence[int], *, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, placement: int = 0
) -> Cache:
    """Sequences with the same contents for every `placement` of their blocks; what no sequence owns is NaN."""
    counts = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(counts) + 5
    pool = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    k, v = pool[:, 1, 0], pool[:, 1, 1]
    free = list(range(num_blocks))
    random.Random(placement).shuffle(free)
    tables = []
    for sequence, (length, count) in enumerate(zip(kv_lens, counts, strict=True)):
        table = [free.pop() for _ in range(count)]
        for cache, seed in ((k, 2 * sequence), (v, 2 * sequence + 1)):
            values = normal(num_kv_heads, length, head_dim, dtype=dtype, seed=seed)
            for index, block in enumerate(table):
                part = values[:, index * block_size : (index + 1) * block_size]
                cache[block, :, : part.shape[1]] = part
        tables.append(tuple(table))
    return Cache(k, v, tuple(tables), block_size)
