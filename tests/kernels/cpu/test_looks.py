"""Looks at logits while they are made: the same, to the bit, as looks at whole rows, and what numpy finds in those."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kernels.cpu
from engine.philox import NoiseKey, all_words, gumbel
from kernels.cpu.draws import DRAW
from kernels.cpu.looks import LOOK, Look, Seen
from kernels.cpu.native import NativeKernels
from kernels.cpu.products import NativeWeight
from tests.kernels.cpu.harness import assert_same_bits, case, normal
from tests.kernels.cpu.test_grouped import k_matrix, matrix
from tests.kernels.cpu.test_int8 import on

SHAPES = [  # rows, vocabulary, columns asked about, depth
    (1, 1, 1, 8), (2, 31, 31, 64), (3, 33, 32, 96), (1, 64, 63, 64), (5, 65, 65, 896), (12, 300, 299, 64),
    (13, 129, 129, 96), (33, 1000, 1000, 64), (65, 4099, 4097, 64), (300, 200, 200, 32), (4, 700, 699, 896),
    (3, 700, 699, 288),  # of 128 KB 7 panels of bfloat16, 3 of float32: chunks of 6 and 2, since they are whole blocks
]  # fmt: skip


def looks_for(num_rows: int, num_columns: int) -> list[Look]:
    """Several at some rows, none at others, in no order."""
    looks = []
    for row in range(num_rows - 1, -1, -1):
        if row % 5 != 3:
            looks.append(Look(row, num_top=1 + row % 7, wants_total=row % 2 == 0))
        if row % 3 == 0:
            looks += [Look(row, temperature=0.5 + choice, key=NoiseKey(row, 9, choice)) for choice in range(2)]
    return looks


def contenders_of(seen: Seen) -> np.ndarray:
    return np.array([-1]) if seen.contenders is None else seen.contenders


def same(left: Seen, right: Seen, look: Look) -> bool:
    return (
        left.is_broken == right.is_broken
        and left.top_ids.tolist() == right.top_ids.tolist()
        and left.top_values.tobytes() == right.top_values.tobytes()
        and (not look.wants_total or left.log_total == right.log_total)
        and np.array_equal(contenders_of(left), contenders_of(right))
    )


def check(native: NativeKernels, x: torch.Tensor, weight: NativeWeight, num_columns: int) -> None:
    """In passing against whole rows, each row alone against all together, and both against numpy."""
    logits = native.logits(x, weight)
    looks, whole = looks_for(len(x), num_columns), [row for row in range(len(x)) if row % 4 == 1]
    written, seen = native.logits_looked_at(x, weight, num_columns, looks, whole)
    assert_same_bits(written[whole], logits[whole])
    table = logits.numpy()
    for look, own, again in zip(looks, seen, native.look(table, num_columns, looks), strict=True):
        row = table[look.row, :num_columns]
        order = np.lexsort((np.arange(num_columns), -row))[: look.num_top]
        with case(len(x), look):
            assert same(own, again, look)
            assert own.top_ids.tolist() == order.tolist()
            assert own.top_values.tolist() == row[order].tolist()
            if look.wants_total:
                expected = np.logaddexp.reduce(row.astype(np.float64))
                assert own.log_total == pytest.approx(expected, abs=3e-7 + 1e-7 * abs(expected))
            if look.temperature:
                scores = row / look.temperature + gumbel(all_words(NoiseKey(*look.key), num_columns))
                assert own.contenders is not None
                assert scores.argmax() in own.contenders
                assert (scores[own.contenders] >= scores.max() - 2e-4).all()
    for look, own in list(zip(looks, seen, strict=True))[:8]:
        _, (alone,) = native.logits_looked_at(
            x[look.row : look.row + 1], weight, num_columns, [replace(look, row=0)], []
        )
        assert same(alone, own, look)


def test_plain_weights(native: NativeKernels, dtype: torch.dtype) -> None:
    for rows, vocabulary, num_columns, depth in SHAPES:
        x = normal(rows, depth, dtype=dtype, seed=1, scale=4)
        check(native, x, native.pack(normal(vocabulary, depth, dtype=dtype, seed=2)), num_columns)


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_int8_weights(native: NativeKernels, dtype: torch.dtype, quantization: str) -> None:
    quantized = on(native, quantization)  # type: ignore[arg-type]
    for rows, vocabulary, num_columns, depth in SHAPES[::2]:
        x = normal(rows, depth, dtype=dtype, seed=1, scale=4)
        check(quantized, x, quantized.pack(normal(vocabulary, depth, dtype=dtype, seed=2)), num_columns)


def test_grouped_weights(native: NativeKernels, dtype: torch.dtype) -> None:
    weights = [matrix(kind, 1001, 384, 128, seed=3) for kind in ("int4", "int8", "fp8", "int5")]
    weights += [k_matrix(kind, 1001, 512, seed=4) for kind in ("uint4", "uint5", "int6")]
    for weight in weights:
        packed = native.pack_groups(weight, dtype=dtype)
        for rows in (1, 13, 40):
            with case(weight.kind):
                check(native, normal(rows, packed.num_in, dtype=dtype, seed=1, scale=4), packed, 1001)


def test_of_equal_logits_the_lowest_id_comes_first(native: NativeKernels) -> None:
    weight = native.pack(normal(7, 32, dtype=torch.bfloat16, seed=2).repeat(143, 1))
    x = normal(4, 32, dtype=torch.bfloat16, seed=1)
    _, seen = native.logits_looked_at(x, weight, 1001, [Look(row, num_top=3) for row in range(4)], [])
    for own in seen:
        assert own.top_ids.tolist() == [own.top_ids[0] + i * 7 for i in range(3)]
        assert own.top_ids[0] < 7


def test_what_is_not_finite_stays_in_its_row(native: NativeKernels) -> None:
    weight = native.pack(normal(500, 64, dtype=torch.float32, seed=2))
    x = normal(5, 64, dtype=torch.float32, seed=1)
    looks = [Look(row, num_top=2, wants_total=True) for row in range(5)]
    _, right = native.logits_looked_at(x, weight, 500, looks, [])
    x[1], x[3, 5] = torch.nan, torch.inf
    _, seen = native.logits_looked_at(x, weight, 500, looks, [])
    assert seen[1].is_broken
    assert seen[3].is_broken or seen[3].top_values[0] == np.inf
    for row in (0, 2, 4):
        assert same(seen[row], right[row], looks[row])


def test_a_rank_counts_equal_logits_of_lower_ids_first(native: NativeKernels) -> None:
    rows = np.random.default_rng(3).integers(-20, 20, size=(3, 1000)).astype(np.float32)
    looks = [Look(row, num_top=1, token=token) for row in range(3) for token in (0, 1, 500, 998)]
    for look, own in zip(looks, native.look(rows, 999, looks), strict=True):
        order = np.lexsort((np.arange(999), -rows[look.row, :999])).tolist()
        assert own.rank == 1 + order.index(look.token)


def test_tables_are_laid_out_as_the_kernels_read_them(native: NativeKernels) -> None:
    module = kernels.cpu.load().module
    assert (LOOK.itemsize, DRAW.itemsize) == (module.LOOK_BYTES, module.DRAW_BYTES)
