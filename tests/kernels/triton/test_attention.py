"""Decode and prefill attention against float64, against each other, and a row against itself in other company."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.triton import attention_shapes, attention_tile, decode_attention, prefill_attention
from tests.kernels.triton.attention_case import TOLERANCE, AttentionCase, AttentionInputs
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import DTYPES

# Decode's, whose ways through the kernel others go too.
LATER = {"no groups", "groups of 8", "window of a split", "soft-cap", "blocks of 32", "head size 96", "head size 128"}


# One token, a full block and one over, a whole split and one over, several splits; padding rows; two tokens at once.
UGLY = AttentionCase((1, 1, 0, 1, 2, 1, 1, 0), (1, 16, 0, 17, 255, 256, 257, 0), num_kv_heads=1)
LONG = AttentionCase((1, 3), (515, 700), num_kv_heads=1)
DECODE = {
    "ugly lengths": UGLY,
    "no groups": replace(UGLY, group_size=1),
    "groups of 7": replace(UGLY, group_size=7),
    "groups of 8": replace(UGLY, group_size=8),
    "more kv heads": AttentionCase((1, 1), (33, 300), num_kv_heads=3, group_size=2),
    "window of 1": replace(LONG, window=1),
    "window of 100": replace(LONG, window=100),
    "window of a split": replace(LONG, window=256),
    "soft-cap": replace(LONG, cap=2.0),
    "soft-cap and window": replace(LONG, cap=30.0, window=300),
    "blocks of 32": replace(LONG, block_size=32),
    "blocks of 48, splits of 240": replace(LONG, block_size=48),
    **{f"head size {size}": replace(LONG, head_dim=size) for size in (80, 96, 128, 256)},
}
PREFILL = {
    "ugly lengths": AttentionCase((1, 17, 0, 33, 5), (1, 17, 0, 290, 256), num_kv_heads=1),
    "groups of 7": AttentionCase((19, 37), (19, 300), num_kv_heads=1, group_size=7),
    "groups of 8": AttentionCase((16, 33), (272, 33), num_kv_heads=1, group_size=8),
    "no groups, more than a tile": AttentionCase((130,), (140,), num_kv_heads=1, group_size=1),
    "more kv heads": AttentionCase((9,), (270,), num_kv_heads=3, group_size=2),
    "window of 1": AttentionCase((40,), (40,), num_kv_heads=1, window=1),
    "window of 100": AttentionCase((70,), (400,), num_kv_heads=1, window=100),
    "soft-cap": AttentionCase((40,), (300,), num_kv_heads=1, cap=2.0),
    **{f"head size {size}": AttentionCase((35,), (270,), num_kv_heads=1, head_dim=size) for size in (80, 96, 128, 256)},
}


def is_close(inputs: AttentionInputs, out: torch.Tensor) -> bool:
    return inputs.error(out) <= TOLERANCE[inputs.case.dtype]  # False for NaN


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.nightly if name in LATER else ()) for name in DECODE]
)
def test_decode_against_float64(case: str) -> None:
    inputs = DECODE[case].make()
    assert is_close(inputs, inputs.decode())


@pytest.mark.parametrize("case", PREFILL)
def test_prefill_against_float64(case: str) -> None:
    inputs = PREFILL[case].make()
    assert is_close(inputs, inputs.prefill())


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_16_bits(dtype: str) -> None:
    decode = replace(LONG, dtype=DTYPES[dtype], head_dim=80).make()
    assert is_close(decode, decode.decode())
    prefill = replace(PREFILL["ugly lengths"], dtype=DTYPES[dtype]).make()
    assert is_close(prefill, prefill.prefill())


E4M3 = {
    "float32": AttentionCase((1, 2), (17, 300), num_kv_heads=2, group_size=2, fp8=True),
    "bfloat16": AttentionCase((9, 1), (33, 260), num_kv_heads=2, window=100, dtype=torch.bfloat16, fp8=True),
    "heads of 256": AttentionCase((3, 1), (33, 40), num_kv_heads=1, head_dim=256, fp8=True),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("case", E4M3)
def test_e4m3_cache(case: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close to float64 on what the cache stands for; decode and prefill give the same bits."""
    monkeypatch.setattr(attention_shapes, "has_conversion", lambda arch: native)
    inputs = E4M3[case].make()
    out = inputs.decode()
    assert is_close(inputs, out)
    assert torch.equal(inputs.prefill(), out)
    assert torch.equal(inputs.only(1).decode(), out[-inputs.case.query_lens[1] :])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kernels", "old", "new"),
    [
        (decode_attention, "k_scale + kv_head.to(tl.int64) * stride_scale_head", "k_scale"),
        (decode_attention, "v_scale + kv_head.to(tl.int64) * stride_scale_head", "v_scale"),
        (decode_attention, "    stride_scale_block,\n            D,", "    stride_scale_head,\n            D,"),
        (prefill_attention, "k_scale + kv_head.to(tl.int64) * stride_scale_head", "k_scale"),
        (prefill_attention, "v_scale + kv_head.to(tl.int64) * stride_scale_head", "v_scale"),
    ],
)
def test_a_bug_in_the_scales_goes_red(
    kernels: ModuleType, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kernels.__name__.rpartition(".")[2]
    broken = getattr(mutant(kernels, old, new, tmp_path), name)
    monkeypatch.setattr(f"tests.kernels.triton.attention_case.{name}", broken)
    inputs = E4M3["float32"].make()
    assert not is_close(inputs, inputs.decode() if kernels is decode_attention else inputs.prefill())


SEEN_BY_DECODE = replace(LONG, window=300, seed=5)
SEEN_BY_PREFILL = AttentionCase((40,), (300,), num_kv_heads=1, window=100, seed=5)
TILE_BUGS = [
    ("key[None, :] <= position", "key[None, :] < position"),
    ("> position[:, None] - WINDOW", ">= position[:, None] - WINDOW"),
    ("key // BLOCK_SIZE", "key // BLOCK_SIZE * 0"),
    ("slot = key % BLOCK_SIZE", "slot = (key + 1) % BLOCK_SIZE"),
    ("norm = tl.fma(norm, shrink, tl.sum", "norm = tl.fma(norm, 1.0, tl.sum"),
    ("total * shrink[:, None], input", "total, input"),
    ("split_norm * weight)", "split_norm)"),
    ("tl.maximum(position - WINDOW + 1, 0) // SPLIT", "position // SPLIT"),
    (" // N * N", " // N * N + N"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("old", "new"), TILE_BUGS)
def test_a_bug_in_the_tile_goes_red(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(attention_tile, old, new, tmp_path)
    for module in (decode_attention, prefill_attention):
        for name in ("attend_split", "merge", "first_split"):
            monkeypatch.setattr(module, name, getattr(broken, name))
    decode, prefill = SEEN_BY_DECODE.make(), SEEN_BY_PREFILL.make()
    with pytest.raises(AssertionError):
        assert is_close(decode, decode.decode()) and is_close(prefill, prefill.prefill())  # noqa: PT018


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(part_norm + part + split)", "tl.load(part_norm + part)"),
        ("tl.where(valid, earliest + token, -1)", "tl.where(valid, kv_len - 1, -1)"),
        ("tl.cdiv(kv_len, SPLIT)", "(kv_len // SPLIT)"),
        ("scale * LOG2_E", "scale"),
    ],
)
def test_a_bug_in_decode_goes_red(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(decode_attention, old, new, tmp_path)
    monkeypatch.setattr("tests.kernels.triton.attention_case.decode_attention", broken.decode_attention)
    inputs = SEEN_BY_DECODE.make()
    assert not is_close(inputs, inputs.decode())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first_token + row // G", "first_token + row // G + 1"),
        ("tl.minimum(first_token + M // G, num_tokens)", "first_token"),
        ("earliest - WINDOW + 1, 0", "earliest, 0"),
        ("total / tl.where(valid, norm, 1.0)", "total / tl.where(valid, norm + 1e-3, 1.0)"),
    ],
)
def test_a_bug_in_prefill_goes_red(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(prefill_attention, old, new, tmp_path)
    monkeypatch.setattr("tests.kernels.triton.attention_case.prefill_attention", broken.prefill_attention)
    inputs = SEEN_BY_PREFILL.make()
    assert not is_close(inputs, inputs.prefill())


INVARIANT = {
    "plain": AttentionCase((1, 40, 1, 9), (300, 290, 17, 600), num_kv_heads=1, group_size=1, seed=7),
    "groups of 7, window, bfloat16": AttentionCase(
        (1, 9, 8), (515, 600, 8), num_kv_heads=1, group_size=7, window=130, dtype=torch.bfloat16, seed=8
    ),
}


@pytest.mark.parametrize("case", INVARIANT)
def test_a_row_does_not_depend_on_the_batch_the_chunk_or_the_kernel(case: str) -> None:
    """Bitwise: each sequence alone, its newest tokens alone, prefilled or decoded, gives the rows of the batch."""
    inputs = INVARIANT[case].make()
    together = inputs.prefill()
    end = 0
    for sequence, query_len in enumerate(inputs.case.query_lens):
        end += query_len
        alone = inputs.only(sequence)
        assert torch.equal(alone.prefill(), together[end - query_len : end])
        for count in {1, min(query_len, 8)}:
            newest = inputs.only(sequence, count)
            assert torch.equal(newest.prefill(), together[end - count : end])
            assert torch.equal(newest.decode(), together[end - count : end])


def test_a_row_does_not_depend_on_the_placement_of_its_blocks() -> None:
    inputs = AttentionCase((1, 9), (300, 90), num_kv_heads=1).make()
    order = torch.randperm(inputs.k_cache.shape[0], generator=torch.Generator().manual_seed(9))
    place = order.argsort().tolist()
    moved = replace(
        inputs,
        k_cache=inputs.k_cache[order],
        v_cache=inputs.v_cache[order],
        tables=[[place[block] for block in table] for table in inputs.tables],
    )
    assert torch.equal(moved.decode(), inputs.decode())
    assert torch.equal(moved.prefill(), inputs.prefill())


def test_decode_does_not_depend_on_the_bound_of_the_lengths() -> None:
    inputs = AttentionCase((1, 1), (300, 40), num_kv_heads=1).make()
    longest = replace(inputs, case=replace(inputs.case, query_lens=(1, 1, 0), kv_lens=(300, 40, 1200)))
    longest = replace(longest, tables=[*inputs.tables, [0] * 75])
    assert torch.equal(longest.decode(), inputs.decode())


def test_blocks_beyond_2_to_the_31_elements() -> None:
    """Only the pages that are touched exist."""
    inputs = AttentionCase((1,), (33,), num_kv_heads=1, dtype=torch.float16).make()
    stride = 2**30 + 64
    far = [
        torch.empty(2 * stride + 4096, dtype=torch.float16).as_strided((3, 1, 16, 64), (stride, 1024, 64, 1))
        for _ in range(2)
    ]
    for cache, source in zip(far, (inputs.k_cache, inputs.v_cache), strict=True):
        cache.copy_(source[inputs.tables[0]])
    moved = replace(inputs, k_cache=far[0], v_cache=far[1], tables=[[0, 1, 2]])
    assert torch.equal(moved.decode(), inputs.decode())
    assert torch.equal(moved.prefill(), inputs.prefill())


def test_no_tokens_and_what_does_not_fit() -> None:
    inputs = UGLY.make()
    padding = replace(UGLY, query_lens=(0,) * 8)
    assert replace(inputs, case=padding, q=inputs.q[:0]).decode().shape == (0, 4, 64)
    assert replace(inputs, case=padding, q=inputs.q[:0]).prefill().shape == (0, 4, 64)
    with pytest.raises(ValueError, match="the cache torch"):
        replace(inputs, q=inputs.q.half()).decode()
    with pytest.raises(ValueError, match="k_scale of an e4m3 cache must be float32"):
        replace(E4M3["float32"].make(), scales=None).decode()
    with pytest.raises(ValueError, match="k_scale is for an e4m3 cache"):
        replace(inputs, scales=[torch.ones(1)] * 2).decode()
    with pytest.raises(ValueError, match="65 query heads per kv head, at most 64"):
        replace(LONG, group_size=65).make().decode()
