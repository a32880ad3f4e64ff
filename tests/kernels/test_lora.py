"""Adapters in a batch: against float64, and each row bit for bit the same whatever adapters the others have."""

import pytest
import torch

from engine.kernel_set import KernelSet
from kernels.lora import LoraRows, add_to_embedding
from tests.kernels.kernel_sets import DTYPES, KERNEL_SETS
from tests.kernels.lora_cases import MAX_RANK, expected, make_stack, of_rows

ROWS = 41
SLOTS = [(0, 1, -1, 3, 4, 3, 2)[i * i % 7] for i in range(ROWS)]
WIDTHS = (48, 20, 33)


def run(kernels: KernelSet, dtype: torch.dtype, depth: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on some of the rows; what it should be."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, depth, generator=generator).to(dtype)[rows]
    y = torch.randn(ROWS, sum(WIDTHS), generator=generator).to(dtype)[rows]
    stack, slots = make_stack(WIDTHS, depth, dtype), [SLOTS[row] for row in rows]
    wanted = expected(y, x, stack, slots)
    if (lora := of_rows(stack, slots)) is not None:
        kernels.lora(y, x, lora)
    return y, wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_agrees_with_float64_and_leaves_other_rows_alone(kernels: str, dtype: str) -> None:
    for depth in (64, 75, 640):
        y, wanted = run(KERNEL_SETS[kernels], DTYPES[dtype], depth, list(range(ROWS)))
        unit = 2e-6 if dtype == "float32" else 2**-8
        assert ((y.double() - wanted).abs() <= unit * (wanted.abs() + 4)).all()
        for row, slot in enumerate(SLOTS):
            if slot in (-1, 2):
                assert torch.equal(y[row].double(), wanted[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_a_row_does_not_depend_on_the_others_adapters(kernels: str, dtype: str) -> None:
    for depth in (64, 75, 640):
        whole, _ = run(KERNEL_SETS[kernels], DTYPES[dtype], depth, list(range(ROWS)))
        for rows in [[i] for i in range(0, ROWS, 3)] + [
            list(range(5, 30)),
            [40, 3, 17, 4],
            [i for i in range(ROWS) if SLOTS[i] == 3],
        ]:
            some, _ = run(KERNEL_SETS[kernels], DTYPES[dtype], depth, rows)
            assert torch.equal(some, whole[rows]), f"depth {depth}, rows {rows}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding(dtype: str) -> None:
    generator = torch.Generator().manual_seed(3)
    stack = make_stack((40,), 9, DTYPES[dtype])
    table = torch.zeros(len(stack.ranks), 1, 30, MAX_RANK)
    table[:] = torch.randn(len(stack.ranks), 1, 30, MAX_RANK, generator=generator)
    stack = type(stack)(table.to(DTYPES[dtype]), stack.b, stack.ranks, stack.widths, stack.columns)
    ids = torch.tensor([4, 4, 29, 0, 7])
    base = torch.randn(5, 40, generator=generator).to(DTYPES[dtype])
    slots = [3, -1, 0, 2, 3]
    lora = of_rows(stack, slots)
    assert lora is not None
    x = base.clone()
    add_to_embedding(x, ids, lora, 3.0)
    for row, slot in enumerate(slots):
        rank = 0 if slot < 0 else int(stack.ranks[slot, 0])
        wanted = base[row].double() + 3.0 * stack.a[slot, 0, ids[row], :rank].double() @ stack.b[slot, :rank].double()
        torch.testing.assert_close(x[row].double(), wanted, rtol=2**-7, atol=2e-6 if dtype == "float32" else 0.05)
        alone = base[row : row + 1].clone()
        if (one := of_rows(stack, [slot])) is not None:
            add_to_embedding(alone, ids[row : row + 1], one, 3.0)
        assert torch.equal(alone[0], x[row])


def test_rows_are_sorted_by_slot_and_cut_into_blocks() -> None:
    rows = LoraRows.build([1, -1, 0, 1, 1, *[2] * 20])
    assert rows is not None
    assert rows.rows.tolist() == [2, 0, 3, 4, *range(5, 25)]
    assert [(slot, group.tolist()) for slot, group in rows.groups] == [
        (0, [2]),
        (1, [0, 3, 4]),
        (2, list(range(5, 25))),
    ]
    assert rows.blocks.tolist() == [[0, 0, 1], [1, 1, 4], [2, 4, 20], [2, 20, 24]]
    assert LoraRows.build([-1, -1]) is None
