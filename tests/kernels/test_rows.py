"""Row invariance, bit for bit: a row computed alone equals the same row among any number of others, at any place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernel_set import KernelSet
from kernels.tiled import TiledKernels
from tests.kernels.kernel_sets import DTYPES, KERNEL_SETS

ROWS = 37  # more than two tiles, and not a whole number of them
POSITIONS = torch.arange(ROWS) * 97
RowOp = Callable[[KernelSet, Tensor, slice], Tensor]


def weight(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_columns)
    return (torch.randn(num_rows, num_columns, generator=generator) * num_columns**-0.5).to(dtype)


def linear_to(num_out: int, *, bias: bool = False) -> RowOp:
    def op(kernels: KernelSet, x: Tensor, rows: slice) -> Tensor:
        w = weight(num_out, x.shape[1], x.dtype)
        return kernels.linear(x[rows], w, weight(1, num_out, x.dtype)[0] if bias else None)

    return op


def rope(kernels: KernelSet, x: Tensor, rows: slice) -> Tensor:
    heads = x[:, : x.shape[1] // 4 * 4].unflatten(1, (2, -1))
    inv_freq = 1.0 / 10000.0 ** (torch.arange(heads.shape[2] // 2) / 16)
    cos, sin = kernels.rope_tables(POSITIONS[rows], inv_freq, 1.25)
    return kernels.apply_rope(heads[rows], cos, sin)


OPS: dict[str, RowOp] = {
    "linear to 1": linear_to(1),
    "linear to 64": linear_to(64),
    "linear to 300": linear_to(300),
    "linear to 2500, more than a column tile": linear_to(2500),
    "linear with bias": linear_to(96, bias=True),
    "logits": lambda kernels, x, rows: kernels.logits(x[rows], weight(300, x.shape[1], x.dtype)),
    "rms_norm": lambda kernels, x, rows: kernels.rms_norm(x[rows], x[0], 1e-6),
    "rms_norm 1 + w": lambda kernels, x, rows: kernels.rms_norm(x[rows], x[0], 1e-6, unit_offset=True),
    "add_rms_norm": lambda kernels, x, rows: kernels.add_rms_norm(x[rows], x.flip(1)[rows], x[0], 1e-6)[0],
    "silu_and_mul": lambda kernels, x, rows: kernels.silu_and_mul(x[rows], x.flip(1)[rows]),
    "gelu_tanh_and_mul": lambda kernels, x, rows: kernels.gelu_tanh_and_mul(x[rows], x.flip(1)[rows]),
    "soft_cap": lambda kernels, x, rows: kernels.soft_cap(x[rows], 3.0),
    "rope": rope,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_the_others(op: str, kernels: str, dtype: str) -> None:
    run, kernel_set = OPS[op], KERNEL_SETS[kernels]
    for depth in (64, 75, 640, 2048):
        x = (torch.randn(ROWS, depth, generator=torch.Generator().manual_seed(depth)) * 2).to(DTYPES[dtype])
        whole = run(kernel_set, x, slice(0, ROWS))
        for rows in [slice(i, i + 1) for i in range(0, ROWS, 5)] + [slice(3, 11), slice(15, 33), slice(1, 37)]:
            assert torch.equal(run(kernel_set, x, rows), whole[rows]), f"depth {depth}, rows {rows.start}:{rows.stop}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_may_hold_anything(dtype: str) -> None:
    kernels = KERNEL_SETS["torch"]
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    w = weight(96, 64, x.dtype)
    alone = kernels.linear(x[5:6], w)
    x[4], x[6] = 1e30, float("nan")
    assert torch.equal(kernels.linear(x, w)[5:6], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(dtype: str) -> None:
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    w = weight(2500, 256, x.dtype)
    expected = TiledKernels(1).linear(x, w)
    for threads in (2, 3):
        kernels = TiledKernels(threads)
        assert 200 * 256 * 2500 > 16_000_000  # enough work to be spread
        assert torch.equal(kernels.linear(x, w), expected)
    assert torch.get_num_threads() == 1


def test_torchs_own_linear_is_not_row_invariant() -> None:
    """Why the tiles exist; if this fails some day, they may go."""
    x = torch.randn(64, 640, generator=torch.Generator().manual_seed(1))
    w = weight(2048, 640, torch.float32)
    alone, among = torch.nn.functional.linear(x[:1], w), torch.nn.functional.linear(x, w)[:1]
    assert not torch.equal(alone, among)
