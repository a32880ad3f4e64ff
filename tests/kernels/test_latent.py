"""Absorbed latent attention over one cell a token against keys and values made of the latents, in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.memory import KvLayout, KvMemory
from kernels.kv_cells import Cells, KvFormat, store_rows
from kernels.latent import expanded_attention, rotate_pairs, unrotate_values
from kernels.paged import PagedBatch, plan_attention
from tests.kernels.kernel_sets import DTYPES, KERNEL_SETS

HEADS, LATENT, KEY, ROPE, VALUE = 3, 40, 12, 8, 10
LENGTH, SCALE = 70, 0.2
FORMATS: dict[KvFormat, float] = {"int8": 0.05, "fp8_e4m3": 0.15}


def random(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


@dataclass(frozen=True)
class Layer:
    """Random matrices and a sequence's queries and cells."""

    keys = random(HEADS, KEY, LATENT, seed=1, size=LATENT**-0.5)
    values = random(HEADS, VALUE, LATENT, seed=2, size=LATENT**-0.5)
    q = random(LENGTH, HEADS, KEY + ROPE, seed=3, size=2.0)
    latents = random(LENGTH, LATENT, seed=4)
    rotated = random(LENGTH, ROPE, seed=5)

    @property
    def expected(self) -> Tensor:
        return expanded_attention(self.q, self.latents, self.rotated, self.keys, self.values, scale=SCALE)

    def absorbed(self, kernels: str, dtype: torch.dtype, kv_format: KvFormat | None = None) -> Tensor:
        """[LENGTH, HEADS, VALUE], in chunks over shuffled blocks."""
        memory = KvMemory(KvLayout(2, 1, LATENT + ROPE, 4, dtype, kv_format, latent=True), 40)
        table = torch.randperm(40, generator=torch.Generator().manual_seed(6)).tolist()
        cells, same = memory.layer(1)
        assert cells is same
        q = torch.cat((torch.einsum("thk,hkl->thl", self.q[..., :KEY], self.keys), self.q[..., KEY:]), dim=-1).to(dtype)
        rows = torch.cat((self.latents, self.rotated), dim=1).to(dtype)[:, None]
        sums = torch.cat([self.chunk(kernels, q, rows, cells, table, *part) for part in ((0, 33), (33, 34), (34, 70))])
        return torch.einsum("thl,hvl->thv", unrotate_values(sums, cells)[..., :LATENT].double(), self.values.double())

    def chunk(self, kernels: str, q: Tensor, rows: Tensor, cells: Cells, table: list[int], a: int, b: int) -> Tensor:
        batch = PagedBatch.build([b - a], [b], [table], 4)
        store_rows(cells, rows[a:b], batch)
        plan = plan_attention(batch, group_size=HEADS, window=None)
        return KERNEL_SETS[kernels].paged_attention(q[a:b], cells, cells, plan, scale=SCALE)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_absorbed_equals_expanded(kernels: str) -> None:
    layer = Layer()
    assert (layer.absorbed(kernels, torch.float32) - layer.expected).abs().max() < 1e-5
    # bfloat16 rounds queries and cells to 2^-9 of themselves, and scores are sums of fifty such products.
    assert (layer.absorbed(kernels, torch.bfloat16) - layer.expected).abs().mean() < 0.01


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_quantized_cells_come_back_as_they_were(kernels: str) -> None:
    """Int8's are rotated, and so are their sums before they are turned back."""
    layer = Layer()
    size = float(layer.expected.abs().mean())
    for kv_format, tolerance in FORMATS.items():
        error = (layer.absorbed(kernels, torch.float32, kv_format) - layer.expected).abs().mean()
        assert 0 < error < tolerance * size, kv_format


def test_a_block_has_one_cell_for_each_token_and_layer() -> None:
    layout = KvLayout(27, 1, 512 + 64, 16, torch.bfloat16, latent=True)  # DeepSeek-V2-Lite's
    assert layout.block_bytes == 27 * 16 * 576 * 2
    assert layout.layout_id == "canonical/l27.latent.b16.d576/bfloat16"
    assert layout.layout_id != KvLayout(27, 1, 576, 16, torch.bfloat16).layout_id


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_are_rotated_by_their_angle(interleaved: bool) -> None:
    x, angle = random(5, 2, 8, seed=7), random(5, 4, seed=8)
    out = rotate_pairs(x, torch.cos(angle), torch.sin(angle), interleaved=interleaved)
    pairs = x.unflatten(2, (4, 2)) if interleaved else x.unflatten(2, (2, 4)).transpose(2, 3)
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.exp(1j * angle.double())[:, None]
    assert (out - torch.cat((turned.real, turned.imag), dim=-1)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_rotation_depends_on_that_row_alone(dtype: str) -> None:
    x, angle = random(37, 3, 24, seed=7).to(DTYPES[dtype]), random(37, 12, seed=8)
    cos, sin = torch.cos(angle), torch.sin(angle)
    for interleaved in (True, False):
        whole = rotate_pairs(x, cos, sin, interleaved=interleaved)
        for row in range(37):
            one = slice(row, row + 1)
            assert torch.equal(rotate_pairs(x[one], cos[one], sin[one], interleaved=interleaved), whole[one])
