"""RoPE alone, and fused with QK-norm and the write into the cache."""

import pytest
import torch

from kernels import reference, tiled
from kernels.cpu.native import NativeKernels
from kernels.cpu.rope_rows import KEPT_POSITIONS, MOST_ROWS
from tests.kernels.cpu.harness import UNIT, assert_same_bits, assert_within, case, make_cache, normal

HEADS = [(4, 2, 64), (3, 1, 16), (2, 2, 80), (1, 1, 256), (14, 2, 6)]


def _tables(native: NativeKernels, num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return native.rope_tables(torch.arange(num_tokens) * 37, inv_freq, 1.1)


def test_kept_rows_are_those_that_are_computed(native: NativeKernels) -> None:
    """Alone and in company, before and behind where rows are kept, and of tables that have other frequencies."""
    many = list(range(KEPT_POSITIONS - MOST_ROWS, KEPT_POSITIONS + 1))
    for head_dim, scaling in ((256, 1.0), (80, 1.0), (80, 1.1)):
        inv_freq = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
        for positions in ([0], [511], [512, 3, 700], [KEPT_POSITIONS - 1], [KEPT_POSITIONS], many[:-1], many, [2, 2]):
            rows = torch.tensor(positions)
            expected = tiled.rope_tables(rows, inv_freq, scaling)
            with case(head_dim, scaling, positions[0], len(positions)):
                for found, each in zip(native.rope_tables(rows, inv_freq, scaling), expected, strict=True):
                    assert_same_bits(found, each)
                    assert found.is_contiguous()


def test_apply_rope(native: NativeKernels, dtype: torch.dtype) -> None:
    for num_heads, _, head_dim in HEADS:
        x = normal(50, num_heads, head_dim, dtype=dtype, seed=1)
        cos, sin = _tables(native, 50, head_dim)
        expected = reference.apply_rope(x.double(), cos.double(), sin.double())
        bound = UNIT[dtype] * expected.abs() * 1.01 + UNIT[torch.float32] * 8 * x.double().abs().amax(-1, keepdim=True)
        result = native.apply_rope(x, cos, sin)
        with case(num_heads, head_dim):
            assert_within(result, expected, bound)
            assert_same_bits(native.apply_rope(x[7:8], cos[7:8], sin[7:8]), result[7:8])
            assert_same_bits(native.apply_rope(torch.cat([x, x], 1)[:, :num_heads], cos, sin), result)


@pytest.mark.parametrize("norm", ["none", "plain", "unit_offset"])
def test_rope_and_store(native: NativeKernels, dtype: torch.dtype, norm: str) -> None:
    for heads in HEADS:
        with case(*heads):
            check_rope_and_store(native, dtype, *heads, norm)


def check_rope_and_store(
    native: NativeKernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, norm: str
) -> None:
    """q is rotated in place, k and v arrive in their slots, and nothing else in the cache changes."""
    cache = make_cache((4, 9, 33), num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=8, dtype=dtype)
    batch = cache.batch((1, 9, 30), (4, 9, 33))
    total = batch.num_tokens
    sizes = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
    qkv = normal(total, sum(sizes), dtype=dtype, seed=1, scale=2)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in torch.split(qkv.clone(), sizes, 1))
    cos, sin = _tables(native, total, head_dim)
    q_norm, k_norm = (None if norm == "none" else normal(head_dim, dtype=dtype, seed=s) for s in (2, 3))
    unit_offset = norm == "unit_offset"
    before = cache.k.clone(), cache.v.clone()
    result = native.rope_and_store(
        qkv, cos, sin, cache.k, cache.v, batch, q_norm=q_norm, k_norm=k_norm, eps=1e-6, unit_offset=unit_offset
    )
    assert result.shape == (total, num_heads, head_dim)
    stored = cache.k[batch.slot_blocks, :, batch.slot_offsets]
    for got, source, weight in ((result, q, q_norm), (stored, k, k_norm)):
        wide = source.double()
        if weight is not None:
            wide = reference.rms_norm(wide, weight.double(), 1e-6, unit_offset=unit_offset)
        expected = reference.apply_rope(wide, cos.double(), sin.double())
        bound = UNIT[dtype] * expected.abs() * 1.01 + UNIT[torch.float32] * 16 * (wide.abs().amax(-1, keepdim=True) + 1)
        assert_within(got, expected, bound)
    assert_same_bits(cache.v[batch.slot_blocks, :, batch.slot_offsets], v)
    for after, earlier in zip((cache.k, cache.v), before, strict=True):
        others = torch.ones(after.shape[0], after.shape[2], dtype=torch.bool)
        others[batch.slot_blocks, batch.slot_offsets] = False
        assert_same_bits(after.transpose(1, 2)[others], earlier.transpose(1, 2)[others])
