"""Quantized KV cells: the bytes that native kernels store are the reference's, and attention reads them as it does.

Cells lie in the engine's pool; what no sequence owns there has scales of NaN.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

import kernels.cpu
from engine.memory import KvLayout, KvMemory
from kernels import kv_cells, reference
from kernels.cpu.native import NativeKernels
from kernels.kv_cells import KvFormat, QuantizedCells
from kernels.paged import plan_attention
from tests.kernels.cpu.harness import UNIT, Cache, assert_same_bits, assert_within, case, make_cache, normal
from tests.kernels.cpu.test_attention import CASES, KV_LENS, QUERY_LENS, attend, check_parts
from tests.kernels.cpu.test_rope import HEADS

FORMATS = tuple(kv_cells.LIMITS)


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> KvFormat:
    chosen: KvFormat = request.param
    return chosen


def quantized(plain: Cache, kind: KvFormat) -> Cache:
    """The same sequences in a pool of cells."""
    num_blocks, heads, block_size, head_dim = plain.k.shape
    memory = KvMemory(KvLayout(3, heads, head_dim, block_size, plain.k.dtype, kind), num_blocks)
    memory.buffer[:] = 0xFF  # scales of NaN
    cells = memory.layer(1)
    for to, source in zip(cells, (plain.k, plain.v), strict=True):
        assert isinstance(to, QuantizedCells)
        values, scales = kv_cells.quantize(kind, kv_cells.rotate(source.float()) if to.rotated else source)
        to.values.copy_(values)
        to.scales.copy_(scales)
    return Cache(cells[0], cells[1], plain.tables, block_size)  # type: ignore[arg-type]


def make(kind: KvFormat, kv_lens: tuple[int, ...], placement: int = 0, **shape: int | torch.dtype) -> Cache:
    return quantized(make_cache(kv_lens, placement=placement, **shape), kind)  # type: ignore[arg-type]


@cache
def oracle(
    kind: KvFormat, dtype: torch.dtype, group: int, heads: int, head_dim: int, block_size: int, window: int | None,
    cap: float | None,
) -> tuple[Cache, Tensor, Tensor, Tensor]:  # fmt: skip
    """The cache, queries, the result, and what it would be with |v|: how large the terms are whose errors add up."""
    cells = make(kind, KV_LENS, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    q = normal(sum(QUERY_LENS), group * heads, head_dim, dtype=dtype, seed=99)
    plan = plan_attention(cells.batch(QUERY_LENS, KV_LENS), group_size=group, window=window)
    expected, size = (
        reference.paged_attention(q.double(), cells.k, v, plan, scale=head_dim**-0.5, cap=cap)
        for v in (cells.v, magnitude(cells.v))
    )
    return cells, q, expected, size


def test_attention_agrees_with_the_reference(native: NativeKernels, dtype: torch.dtype, kind: KvFormat) -> None:
    for group, heads, head_dim, block_size, window, cap in CASES:
        cells, q, expected, size = oracle(kind, dtype, group, heads, head_dim, block_size, window, cap)
        result = attend(native, cells, q, QUERY_LENS, KV_LENS, window=window, cap=cap)
        # As for a plain cache; in bfloat16 the rotated queries are rounded too.
        bound = UNIT[dtype] * (1.1 * expected.abs() + (2 if dtype == torch.bfloat16 else 40) * size) + 1e-6
        with case(group, heads, head_dim, block_size, window, cap):
            assert_within(result, expected, bound)


def magnitude(cells: Tensor | QuantizedCells) -> Tensor:
    assert isinstance(cells, QuantizedCells)
    return cells.load(torch.arange(cells.shape[0]), torch.float64).nan_to_num().abs()


def test_a_token_is_the_same_alone_in_a_chunk_and_in_other_blocks(
    native: NativeKernels, dtype: torch.dtype, kind: KvFormat
) -> None:
    for group, heads, head_dim, block_size, window, cap in CASES[:3]:
        caches = [
            make(kind, KV_LENS, p, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
            for p in (0, 1)
        ]
        q = normal(sum(QUERY_LENS), group * heads, head_dim, dtype=dtype, seed=99)
        together = attend(native, caches[0], q, QUERY_LENS, KV_LENS, window=window, cap=cap)
        with case(group, heads, head_dim, block_size, window, cap):
            assert_same_bits(attend(native, caches[1], q, QUERY_LENS, KV_LENS, window=window, cap=cap), together)
            check_parts(native, caches[1], q, together, window, cap)


def test_threads_change_nothing(native: NativeKernels, dtype: torch.dtype, kind: KvFormat) -> None:
    cells = make(kind, (1500, 40), num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype)
    q = normal(2, 4, 64, dtype=dtype, seed=5)
    results = []
    for num_threads in (1, 3):
        kernels.cpu.load().configure_threads(num_threads)
        results.append(attend(native, cells, q, (1, 1), (1500, 40)))
    assert_same_bits(results[1], results[0])


def test_rope_and_store_stores_what_the_reference_does(
    native: NativeKernels, dtype: torch.dtype, kind: KvFormat
) -> None:
    """Byte for byte, of the key that the plain cache gets; a row's bytes are the same without its neighbours."""
    for num_heads, num_kv_heads, head_dim in HEADS:
        plain = make_cache((4, 9, 33), num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=5, dtype=dtype)
        batch = plain.batch((1, 9, 30), (4, 9, 33))
        width = (num_heads + 2 * num_kv_heads) * head_dim
        qkv = normal(batch.num_tokens, width, dtype=dtype, seed=1, scale=2)
        qkv[3, num_heads * head_dim] = torch.inf
        qkv[4, -1] = torch.nan
        qkv[5] = 0.0
        inv_freq = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
        cos, sin = native.rope_tables(torch.arange(batch.num_tokens) * 37, inv_freq, 1.1)
        k_norm = normal(head_dim, dtype=dtype, seed=3)
        expected_q = native.rope_and_store(
            qkv.clone(), cos, sin, plain.k, plain.v, batch, q_norm=k_norm, k_norm=k_norm, eps=1e-6
        )
        cells = quantized(plain, kind)
        expected = quantized(plain, kind)
        kept = native.rope_and_store(
            qkv.clone(), cos, sin, cells.k, cells.v, batch, q_norm=k_norm, k_norm=k_norm, eps=1e-6
        )
        at = batch.slot_blocks, slice(None), batch.slot_offsets
        reference.write_kv(plain.k[at], plain.v[at], expected.k, expected.v, batch)
        with case(num_heads, num_kv_heads, head_dim):
            assert_same_bits(kept, expected_q)
            for found, wanted in ((cells.k, expected.k), (cells.v, expected.v)):
                assert isinstance(found, QuantizedCells)
                assert isinstance(wanted, QuantizedCells)
                assert torch.equal(found.values, wanted.values)
                assert torch.equal(found.scales.nan_to_num(7.0), wanted.scales.nan_to_num(7.0))
