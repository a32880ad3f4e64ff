"""The two formats of a KV cache in one byte a value: rounding, layout, and rows that know nothing of each other."""

import pytest
import torch

from engine.memory import KvLayout, KvMemory
from kernels import kv_cells
from kernels.kv_cells import KvFormat, QuantizedCells, quantize, rotate
from kernels.paged import PagedBatch, plan_attention
from tests.kernels.kernel_sets import DTYPES, KERNEL_SETS, RELATIVE

FORMATS = tuple(kv_cells.LIMITS)
# Half a step at the largest value: 1/254 for int8; e4m3 has 3 bits of fraction, so 1/16 of each value.
ERRORS = {"int8": (0.5 / 127, 0.0), "fp8_e4m3": (2.0**-6 / 448, 1 / 16)}


def rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def dequantized(kind: KvFormat, x: torch.Tensor) -> torch.Tensor:
    values, scales = quantize(kind, x)
    numbers = values if kind == "int8" else values.view(torch.float8_e4m3fn)
    return numbers.double() * scales.double()[..., None]


@pytest.mark.parametrize("kind", FORMATS)
def test_the_error_is_a_rounding(kind: KvFormat) -> None:
    x = rows(200, 64)
    of_largest, of_each = ERRORS[kind]
    bound = of_largest * x.abs().amax(-1, keepdim=True) + of_each * x.abs()
    error = (dequantized(kind, x) - x.double()).abs()
    assert (error <= 1.0001 * bound).all()
    assert (error > 0.9 * bound).any(), "the bound is too wide to find anything"
    largest = x.abs().argmax(-1, keepdim=True)
    assert torch.allclose(dequantized(kind, x).float().gather(-1, largest), x.gather(-1, largest), rtol=1e-6)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_row_is_the_same_without_its_neighbours(kind: KvFormat, scale: float) -> None:
    x = rows(50, 3, 24) * scale
    values, scales = quantize(kind, x)
    for row in (0, 7, 49):
        alone = quantize(kind, x[row : row + 1])
        assert torch.equal(alone[0], values[row : row + 1])
        assert torch.equal(alone[1], scales[row : row + 1])


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_row_alone(kind: KvFormat) -> None:
    x = rows(4, 16)
    x[0], x[1, 3], x[2, 5] = 0.0, torch.nan, -torch.inf
    found = dequantized(kind, x)
    assert (found[0] == 0).all()
    assert not found[1:3].isfinite().any()
    assert found[3].isfinite().all()


def test_e4m3_has_no_subnormals() -> None:
    values, _ = quantize(
        "fp8_e4m3", torch.tensor([[448.0, 2.0**-6, 0.99 * 2.0**-6, -(2.0**-9), -(2.0**-6), 0.0, -0.0]])
    )
    assert values.tolist() == [[0x7E, 0x08, 0x00, 0x00, 0x88, 0x00, 0x00]]


@pytest.mark.parametrize(("head_dim", "piece"), [(64, 64), (80, 16), (6, 2), (5, 1)])
def test_rotation_keeps_products(head_dim: int, piece: int) -> None:
    x, y = rows(7, head_dim).double(), rows(7, head_dim, seed=2).double()
    torch.testing.assert_close((rotate(x) * rotate(y)).sum(-1) / piece, (x * y).sum(-1))
    torch.testing.assert_close(rotate(rotate(x)), piece * x)


def test_keys_with_a_few_large_dimensions_are_rotated_for_smaller_errors() -> None:
    x = rows(100, 64)
    x[:, 5] *= 30
    cells = QuantizedCells.view("int8", torch.zeros(1, 1, 100 * 68, dtype=torch.uint8), 100, 64, keys=True)
    cells.store(x[:, None], torch.zeros(100, dtype=torch.int64), torch.arange(100))
    rotated = rotate(cells.load(torch.tensor([0]), torch.float64)[0, 0]) / 64
    assert (rotated - x).norm() < 0.5 * (dequantized("int8", x) - x).norm()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (5, 6), (1, 2)])
def test_cells_are_values_and_then_scales(kind: KvFormat, block_size: int, head_dim: int) -> None:
    layout = KvLayout(2, 3, head_dim, block_size, torch.bfloat16, kind)
    size = -(-block_size * head_dim // 4) * 4 + 4 * block_size
    assert layout.block_bytes == 2 * 2 * 3 * size
    assert layout.layout_id == f"canonical/l2.h3.b{block_size}.d{head_dim}/{kind}"
    memory = KvMemory(layout, 4)
    batch = PagedBatch.build([block_size], [block_size], [[2]], block_size)
    k, v = rows(block_size, 3, head_dim), rows(block_size, 3, head_dim, seed=2)
    KERNEL_SETS["torch"].write_kv(k, v, *memory.layer(1), batch)
    cell = memory.buffer[2].reshape(2, 2, 3, size)[1, 1, 2]
    values, scales = quantize(kind, v[:, 2])
    assert cell[: block_size * head_dim].tobytes() == values.numpy().tobytes()
    assert cell[-4 * block_size :].tobytes() == scales.numpy().tobytes()
    assert not memory.buffer[[0, 1, 3]].any()
    memory.copy_block(2, 0)
    assert (memory.buffer[0] == memory.buffer[2]).all()
    memory.close()


def test_blocks_are_about_half_as_large() -> None:
    ratios = [
        KvLayout(1, 1, head_dim, 16, torch.bfloat16).block_bytes
        / KvLayout(1, 1, head_dim, 16, torch.bfloat16, "int8").block_bytes
        for head_dim in (64, 128, 256)
    ]
    assert ratios == pytest.approx([1.882, 1.939, 1.969], abs=1e-3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_attention_over_cells_is_that_over_what_they_stand_for(kernels: str, dtype: str, kind: KvFormat) -> None:
    """In one chunk, and token by token: the same bits."""
    kernel_set, length, block_size = KERNEL_SETS[kernels], 40, 4
    memory = KvMemory(KvLayout(1, 2, 16, block_size, DTYPES[dtype], kind), 12)
    memory.buffer[:] = 0xFF  # scales of NaN, in blocks that nobody owns
    cells = memory.layer(0)
    q, k, v = (rows(length, heads, 16, seed=heads + i).to(DTYPES[dtype]) for i, heads in enumerate((4, 2, 2)))
    table = [9, 1, 4, 3, 8, 0, 11, 2, 6, 5]
    whole = PagedBatch.build([length], [length], [table], block_size)
    kernel_set.write_kv(k, v, *cells, whole)
    together = kernel_set.paged_attention(q, *cells, plan_attention(whole, group_size=2, window=None), scale=0.3)
    for end in (1, 17, length):
        one = plan_attention(PagedBatch.build([1], [end], [table], block_size), group_size=2, window=None)
        assert torch.equal(kernel_set.paged_attention(q[end - 1 : end], *cells, one, scale=0.3)[0], together[end - 1])

    assert isinstance(cells[0], QuantizedCells)
    k_read, v_read = (each.load(torch.arange(12), torch.float64) for each in cells)  # type: ignore[union-attr]
    plain = rotate(k_read) / 16 if cells[0].rotated else k_read, v_read
    plan = plan_attention(whole, group_size=2, window=None)
    expected = KERNEL_SETS["reference"].paged_attention(q.double(), *plain, plan, scale=0.3)
    torch.testing.assert_close(together.double(), expected, rtol=RELATIVE[DTYPES[dtype]], atol=2e-5)
    memory.close()
