"""Paged attention: against the reference over ugly shapes, and bit for bit the same however a token gets computed."""

from functools import cache

import torch
from torch import Tensor

import kernels.cpu
from kernels import reference
from kernels.cpu.attention import NativePlan
from kernels.cpu.native import NativeKernels
from kernels.paged import plan_attention
from tests.kernels.cpu.harness import UNIT, Cache, assert_same_bits, assert_within, case, make_cache, normal

KV_LENS = (1, 17, 40, 700, 300)
QUERY_LENS = (1, 5, 40, 1, 90)

CASES = [  # group, kv heads, head_dim, block_size, window, cap
    (7, 2, 64, 16, None, None),
    (4, 1, 256, 16, 100, 50.0),
    (1, 3, 80, 4, None, None),
    (2, 2, 16, 16, 19, None),
    (3, 2, 128, 32, None, 30.0),
    (71, 1, 64, 16, 257, None),
    (2, 1, 24, 5, 1, 2.0),
]


def attend(
    native: NativeKernels, cache: Cache, q: Tensor, query_lens: tuple[int, ...], kv_lens: tuple[int, ...],
    which: tuple[int, ...] | None = None, *, window: int | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    batch = cache.batch(query_lens, kv_lens, which)
    plan = native.plan_attention(batch, group_size=q.shape[1] // cache.k.shape[1], window=window)
    return native.paged_attention(q, cache.k, cache.v, plan, scale=q.shape[2] ** -0.5, cap=cap)


@cache
def oracle(
    dtype: torch.dtype, group: int, heads: int, head_dim: int, block_size: int, window: int | None, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The result, and what it would be with |v|: how large the terms are whose rounding errors add up."""
    cache = make_cache(KV_LENS, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    q = normal(sum(QUERY_LENS), group * heads, head_dim, dtype=dtype, seed=99).double()
    plan = plan_attention(cache.batch(QUERY_LENS, KV_LENS), group_size=group, window=window)
    k, v = cache.k.double().nan_to_num(), cache.v.double().nan_to_num()
    expected, size = (
        reference.paged_attention(q, k, values, plan, scale=head_dim**-0.5, cap=cap) for values in (v, v.abs())
    )
    return expected, size


def test_agrees_with_the_reference(native: NativeKernels, dtype: torch.dtype) -> None:
    for group, heads, head_dim, block_size, window, cap in CASES:
        cache = make_cache(KV_LENS, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
        q = normal(sum(QUERY_LENS), group * heads, head_dim, dtype=dtype, seed=99)
        result = attend(native, cache, q, QUERY_LENS, KV_LENS, window=window, cap=cap)
        expected, size = oracle(dtype, group, heads, head_dim, block_size, window, cap)
        # The weights are rounded like q, and so is the result; in float32 the scores and exp err by some tens of units.
        bound = UNIT[dtype] * (1.1 * expected.abs() + (1.1 if dtype == torch.bfloat16 else 40) * size) + 1e-6
        with case(group, heads, head_dim, block_size, window, cap):
            assert_within(result, expected, bound)
            plan = plan_attention(cache.batch(QUERY_LENS, KV_LENS), group_size=group, window=window)
            from_tiled_plan = native.paged_attention(q, cache.k, cache.v, plan, scale=head_dim**-0.5, cap=cap)
            assert_same_bits(from_tiled_plan, result)


def test_a_token_is_the_same_alone_in_a_chunk_and_in_other_blocks(native: NativeKernels, dtype: torch.dtype) -> None:
    for group, heads, head_dim, block_size, window, cap in CASES:
        caches = [
            make_cache(KV_LENS, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, placement=p)
            for p in (0, 1)
        ]
        q = normal(sum(QUERY_LENS), group * heads, head_dim, dtype=dtype, seed=99)
        together = attend(native, caches[0], q, QUERY_LENS, KV_LENS, window=window, cap=cap)
        with case(group, heads, head_dim, block_size, window, cap):
            assert_same_bits(attend(native, caches[1], q, QUERY_LENS, KV_LENS, window=window, cap=cap), together)
            check_parts(native, caches[1], q, together, window, cap)


def test_results_too_small_to_have_a_sign_have_none(native: NativeKernels, dtype: torch.dtype) -> None:
    """Products that flush to -0 stay -0 if nothing follows, but become 0 where hidden tokens follow with weight 0."""
    group, heads, head_dim, block_size = 3, 2, 64, 16
    cache = make_cache(KV_LENS, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    cache.v.mul_(1e-38)
    q = normal(sum(QUERY_LENS), group * heads, head_dim, dtype=dtype, seed=99)
    together = attend(native, cache, q, QUERY_LENS, KV_LENS)
    assert (together == 0).float().mean() > 0.1
    check_parts(native, cache, q, together, None, None)


def check_parts(
    native: NativeKernels, cache: Cache, q: Tensor, together: Tensor, window: int | None, cap: float | None
) -> None:
    """Tokens as decode steps, and as a chunk that begins and ends elsewhere, against all sequences in one batch."""
    ends = [sum(QUERY_LENS[: s + 1]) for s in range(len(QUERY_LENS))]
    for sequence, (end, query_len, kv_len) in enumerate(zip(ends, QUERY_LENS, KV_LENS, strict=True)):
        for back in {0, 1, query_len // 2, query_len - 1} & set(range(query_len)):
            rows = slice(end - 1 - back, end - back)
            alone = attend(native, cache, q[rows], (1,), (kv_len - back,), (sequence,), window=window, cap=cap)
            assert_same_bits(alone, together[rows])
        if query_len > 7:
            rows = slice(end - query_len + 2, end - 3)
            chunk = attend(native, cache, q[rows], (query_len - 5,), (kv_len - 3,), (sequence,), window=window, cap=cap)
            assert_same_bits(chunk, together[rows])


def test_threads_change_nothing(native: NativeKernels, dtype: torch.dtype) -> None:
    cache = make_cache((1500, 40), num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype)
    extension = kernels.cpu.load()
    for query_lens in ((1, 1), (300, 40)):
        q = normal(sum(query_lens), 4, 64, dtype=dtype, seed=5)
        results = []
        for num_threads in (1, 2, 3):
            extension.configure_threads(num_threads)
            results.append(attend(native, cache, q, query_lens, (1500, 40)))
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])


def test_a_query_may_be_a_view_of_the_projections(native: NativeKernels, dtype: torch.dtype) -> None:
    cache = make_cache((50,), num_kv_heads=2, head_dim=32, block_size=16, dtype=dtype)
    wide = normal(50, 8 * 32, dtype=dtype, seed=5)
    q = wide[:, 32 : 5 * 32].view(50, 4, 32)
    assert_same_bits(attend(native, cache, q, (50,), (50,)), attend(native, cache, q.contiguous(), (50,), (50,)))


def test_the_plan_lasts_a_step(native: NativeKernels) -> None:
    cache = make_cache((5, 9), num_kv_heads=1, head_dim=16, block_size=4, dtype=torch.float32)
    plan = native.plan_attention(cache.batch((2, 9), (5, 9)), group_size=2, window=None)
    assert isinstance(plan, NativePlan)
    assert plan.cu_seqlens.tolist() == [0, 2, 11]
    assert plan.kv_lens.tolist() == [5, 9]
