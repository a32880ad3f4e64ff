"""The oracle of each op: float64 accumulation, one rounding to the compute dtype. Slow, plain, row-invariant.

Row invariance: an output row depends on that row alone. torch picks its GEMM kernel, and with it the order of the sum,
by the number of rows, so matrix products run on tiles of a fixed 16 rows (the last one padded), with K and N padded
to whole vectors. All else is made of correctly rounded operations (add, multiply, divide, square root), of exp, cos
and tanh from torch (whose results do not depend on an element's place in the tensor, unlike sigmoid, silu and gelu:
measured with torch 2.13 AVX512, and tested), and of sums over a contiguous last dimension.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kv_cells import Cells, load_blocks, rotate_queries, store_rows
from kernels.lora import Lora
from kernels.paged import AttentionPlan, PagedBatch

NAME = "reference"

_TILE_ROWS = 16
_WEIGHT_ROWS = 8192  # converted to float64 at a time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b. x [M, K], weight [N, K], bias [N] -> [M, N]."""
    return _matmul(x, weight, bias).to(x.dtype)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """y = x Wᵀ in float32. x [M, K], weight [V, K] -> [M, V]."""
    return _matmul(x, weight, None).float()


def lora(y: Tensor, x: Tensor, change: Lora) -> None:
    """y[row] += (x[row] Aᵀ) Bᵀ for rows that have an adapter, in place. x [M, K], y [M, N], maybe in float32."""
    for slot, rows in change.rows.groups:
        for columns, a, b in change.stack.parts(slot):
            product = _matmul(_matmul(x[rows], a, None), b.t(), None)
            y[rows, columns] = (y[rows, columns].double() + product).to(y.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · w, or · (1 + w) with `unit_offset`, over the last dimension."""
    wide = x.contiguous().double()
    normed = wide / torch.sqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    scale = weight.double() + 1.0 if unit_offset else weight.double()
    return (normed * scale).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps, unit_offset=unit_offset), total


def rope_tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position · inv_freq, times `scaling`. positions [T], inv_freq [D / 2] -> float32 [T, D / 2] each.

    The angle itself is a float32 product, as in every implementation the models were trained with.
    """
    angle = (positions.float()[:, None] * inv_freq).double()
    return (torch.cos(angle) * scaling).float(), (torch.sin(angle) * scaling).float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D / 2]). x [T, H, D], cos and sin [T, D / 2] -> [T, H, D]."""
    first, second = x.double().chunk(2, dim=-1)
    wide_cos, wide_sin = cos.double()[:, None], sin.double()[:, None]
    rotated = (first * wide_cos - second * wide_sin, second * wide_cos + first * wide_sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate · sigmoid(gate) · up."""
    wide = gate.double()
    return (wide / (torch.exp(-wide) + 1.0) * up.double()).to(gate.dtype)


def gelu_tanh_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up with gelu(x) = x / 2 · (1 + tanh(sqrt(2 / pi) · (x + 0.044715 x³)))."""
    wide = gate.double()
    inner = (wide * wide * wide * 0.044715 + wide) * 0.7978845608028654
    return (wide * 0.5 * (torch.tanh(inner) + 1.0) * up.double()).to(gate.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return (torch.tanh(x.double() / cap) * cap).to(x.dtype)


def embedding(ids: Tensor, weight: Tensor, scale: float | None = None) -> Tensor:
    """Rows of `weight`, times `scale` rounded to its dtype. ids [T] -> [T, H]."""
    rows = weight[ids]
    return rows if scale is None else rows * torch.tensor(scale).to(weight.dtype)


def write_kv(k: Tensor, v: Tensor, k_cache: Cells, v_cache: Cells, batch: PagedBatch) -> None:
    """Store the step's keys and values [T, Hkv, D] in their slots."""
    store_rows(k_cache, k, batch)
    store_rows(v_cache, v, batch)


def copy_blocks(blocks: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """blocks[dst] = blocks[src] for each (src, dst), in order. blocks [num_blocks, ...]."""
    for source, destination in copies:
        blocks[destination].copy_(blocks[source])


def paged_attention(
    q: Tensor, k_cache: Cells, v_cache: Cells, plan: AttentionPlan, *, scale: float, cap: float | None = None
) -> Tensor:
    """softmax(q Kᵀ · scale, capped) V for each token over its visible positions. q [T, Hq, D] -> [T, Hq, D]."""
    batch = plan.batch
    out, wide = torch.empty_like(q), rotate_queries(q, k_cache, torch.float64)
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    for sequence, kv_len in enumerate(batch.kv_lens):
        num_blocks = -(-kv_len // batch.block_size)
        table = batch.block_tables[sequence, :num_blocks]
        k = load_blocks(k_cache, table, torch.float64).transpose(0, 1).reshape(num_kv_heads, 1, -1, head_dim)
        v = load_blocks(v_cache, table, torch.float64).permute(1, 3, 0, 2).reshape(num_kv_heads, 1, head_dim, -1)
        for row in range(batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1]):
            position = kv_len - batch.cu_seqlens[sequence + 1] + row
            first = 0 if plan.window is None else max(0, position - plan.window + 1)
            query = wide[row].view(num_kv_heads, plan.group_size, 1, head_dim)
            scores = (k[:, :, first : position + 1] * query).sum(-1) * scale
            if cap is not None:
                scores = soft_cap(scores, cap)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            weights = weights / weights.sum(-1, keepdim=True)
            values = v[:, :, :, first : position + 1] * weights[:, :, None]
            out[row] = values.contiguous().sum(-1).view(-1, head_dim).to(q.dtype)
    return out


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b in float64, of which row i depends on x[i] alone."""
    num_rows, depth = x.shape
    rows = F.pad(x.double(), (0, -depth % 8, 0, -num_rows % _TILE_ROWS)).view(-1, _TILE_ROWS, depth + -depth % 8)
    columns = []
    for start in range(0, weight.shape[0], _WEIGHT_ROWS):
        piece = weight[start : start + _WEIGHT_ROWS]
        wide = F.pad(piece.double(), (0, -depth % 8, 0, -piece.shape[0] % 8))
        products = [F.linear(tile, wide)[:, : piece.shape[0]] for tile in rows.unbind()]
        columns.append(torch.cat(products)[:num_rows])
    result = torch.cat(columns, dim=1)
    return result if bias is None else result + bias.double()
