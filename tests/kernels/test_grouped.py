"""The oracle of grouped weights: what they stand for, and what is none."""

import pytest
import torch

from kernels.grouped import GroupedMatrix


def test_dequantized_is_number_by_number_what_was_stored() -> None:
    numbers = torch.tensor([[-8, 7, 3] + [1] * 31] * 2, dtype=torch.int8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    offsets = torch.tensor([[0.25, 0.0], [0.0, -1.0]])
    order = torch.arange(34).roll(1)
    weight = GroupedMatrix("int4", numbers, scales, 32, offsets, order).dequantized()
    for row in range(2):
        for k in range(34):
            expected = float(numbers[row, k]) * float(scales[row, k // 32]) + float(offsets[row, k // 32])
            assert float(weight[row, order[k]]) == expected


def test_fp8_numbers_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(2, 128)
    codes[codes % 128 == 127] = 0
    weight = GroupedMatrix("fp8", codes.view(torch.float8_e4m3fn), torch.ones(2, 1), 128)
    assert torch.equal(weight.dequantized(), codes.view(torch.float8_e4m3fn).float())


def test_what_is_no_weight_is_refused() -> None:
    numbers = torch.zeros(3, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="groups of 48 columns are not supported; supported are 32, 64 or a multiple"):
        GroupedMatrix("int4", numbers, torch.ones(3, 2), 48)
    with pytest.raises(ValueError, match=r"scales are \[3, 3\]; 3 rows of 2 groups need one for each"):
        GroupedMatrix("int4", numbers, torch.ones(3, 3), 32)
    scales = torch.ones(3, 2)
    scales[2, 0] = torch.inf
    with pytest.raises(ValueError, match=r"row 2 of \[3, 64\] has scales with an infinity or a NaN"):
        GroupedMatrix("int4", numbers, scales, 32)
    with pytest.raises(ValueError, match=r"row 2 of \[3, 64\] has offsets with an infinity or a NaN"):
        GroupedMatrix("int4", numbers, torch.ones(3, 2), 32, scales)
    nan = torch.full((3, 64), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"row 0 of .* has a NaN"):
        GroupedMatrix("fp8", nan, torch.ones(3, 2), 32)
