"""The torch kernel set for float32 and bfloat16: fast GEMMs, row-invariant because every one has a fixed shape.

torch picks a GEMM's kernel by its shape, so row 0 of `F.linear` differs between M = 1 and M = 64. At one fixed shape
a row depends neither on its place nor on its neighbours (measured with torch 2.13, oneDNN 3.12 and MKL 2024.2 on
AVX512, in float32 and bfloat16; the tests repeat it). Each runs on one thread, so their number doesn't matter either:

    linear       16 rows (the last tile padded) times up to 2048 columns
    attention    8 query rows (tokens times heads of one kv head) against splits of 256 KV tokens, in float32

All else is correctly rounded elementwise operations, exp, cos and tanh (see `reference`), and sums over a contiguous
last dimension. Inside an op everything is float32 and the result is rounded once; only RMSNorm without `unit_offset`
rounds before the weight too, as Llama does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.kv_cells import Cells, load_blocks, rotate_queries
from kernels.lora import Lora
from kernels.paged import AttentionPlan, split_size
from kernels.tile_pool import TilePool

_TILE_ROWS = 16
_TILE_COLUMNS = 2048
_LORA_RANKS = 16
_SPREAD_MACS = 16_000_000  # multiply-adds worth a second thread: about 0.3 ms
_NO_SCORE = -1e30  # a running maximum that any score replaces; finite, so that exp(m - m') is never NaN


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · w, or · (1 + w) with `unit_offset`, over the last dimension."""
    wide = x.contiguous().float()
    normed = wide * (1.0 / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps))
    if unit_offset:
        return (normed * (weight.float() + 1.0)).to(x.dtype)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps, unit_offset=unit_offset), total


def rope_tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position · inv_freq, times `scaling`. positions [T], inv_freq [D / 2] -> float32 [T, D / 2]."""
    angle = positions.float()[:, None] * inv_freq
    cos, sin = torch.cos(angle), torch.sin(angle)
    return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D / 2]). x [T, H, D], cos and sin [T, D / 2] -> [T, H, D]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate · sigmoid(gate) · up."""
    wide = gate.float()
    return wide.div(torch.exp(-wide).add_(1.0)).mul_(up).to(gate.dtype)


def gelu_tanh_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up with gelu(x) = x / 2 · (1 + tanh(sqrt(2 / pi) · (x + 0.044715 x³)))."""
    wide = gate.float()
    inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(0.7978845608028654)
    return inner.tanh_().add_(1.0).mul_(wide * 0.5).mul_(up).to(gate.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


class TiledKernels:
    """The kernel set. `threads`: how many work on the tiles of one op, this one included."""

    NAME = "torch"

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rope_tables = staticmethod(rope_tables)
    apply_rope = staticmethod(apply_rope)
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_tanh_and_mul = staticmethod(gelu_tanh_and_mul)
    soft_cap = staticmethod(soft_cap)
    embedding = staticmethod(reference.embedding)
    write_kv = staticmethod(reference.write_kv)
    copy_blocks = staticmethod(reference.copy_blocks)

    def __init__(self, threads: int = 1) -> None:
        self._pool = TilePool(threads)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """y = x Wᵀ + b. x [M, K], weight [N, K], bias [N] -> [M, N]."""
        (num_rows, depth), num_columns = x.shape, weight.shape[0]
        tiles = F.pad(x, (0, 0, 0, -num_rows % _TILE_ROWS)).view(-1, _TILE_ROWS, depth)
        starts = range(0, num_columns, _TILE_COLUMNS)
        out = x.new_empty((*tiles.shape[:2], num_columns))

        def multiply(begin: int, end: int) -> None:
            for piece in range(begin, end):
                column, tile = divmod(piece, tiles.shape[0])
                columns = slice(starts[column], starts[column] + _TILE_COLUMNS)
                part = None if bias is None else bias[columns]
                out[tile, :, columns] = F.linear(tiles[tile], weight[columns], part)

        num_pieces = len(starts) * tiles.shape[0]
        self._pool.run(num_pieces, multiply, spread=out.numel() * depth >= _SPREAD_MACS)
        return out.view(-1, num_columns)[:num_rows]

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """y = x Wᵀ in float32. x [M, K], weight [V, K] -> [M, V].

        In bfloat16 the product is rounded to bfloat16 first, as Hugging Face's is: a float32 result would need the
        weights in float32 (85 ms instead of 35 ms for Gemma's 262144 x 640 on 2 cores of an EPYC 9004).
        """
        return self.linear(x, weight).float()

    def lora(self, y: Tensor, x: Tensor, change: Lora) -> None:
        """y[row] += (x[row] Aᵀ) Bᵀ for the rows that have an adapter, in float32 and in place.

        x [M, K], y [M, N] of x's dtype or float32. The tiles are those of `linear`, one adapter's rows in each.
        """
        for slot, rows in change.rows.groups:
            picked = x[rows].float()
            for columns, a, b in change.stack.parts(slot):
                pad = (0, 0, 0, -a.shape[0] % _LORA_RANKS)  # torch's GEMMs over few columns depend on a row's place
                shrunk = self.linear(picked, F.pad(a.float(), pad))
                product = self.linear(shrunk, F.pad(b.float(), pad).t().contiguous())
                y[rows, columns] = y[rows, columns].float().add_(product).to(y.dtype)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        plan: AttentionPlan,
        *,
        scale: float,
        cap: float | None = None,
    ) -> Tensor:
        """softmax(q Kᵀ · scale, capped) V for each token over its visible positions. q [T, Hq, D] -> [T, Hq, D].

        Online softmax over the splits, for all tiles at once. A split in which a row sees nothing leaves the row as it
        was: its maximum stays, its weights are exp(-inf) = 0, and multiplying by exp(0) and adding 0 are exact.
        """
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        num_tiles, rows = plan.gather.shape[0], plan.tokens_per_tile * plan.group_size
        shape = (num_tiles, plan.tokens_per_tile, num_kv_heads, plan.group_size, head_dim)
        tiles = (
            (rotate_queries(q, k_cache, torch.float32) * scale)[plan.gather]
            .view(shape)
            .transpose(1, 2)
            .reshape(num_tiles, num_kv_heads, rows, -1)
        )
        tiles = F.pad(tiles, (0, 0, 0, plan.tile_rows - rows))
        total = torch.zeros_like(tiles)
        norm = tiles.new_zeros((*tiles.shape[:3], 1))
        top = torch.full_like(norm, _NO_SCORE)
        for step in plan.steps:
            active = slice(None) if step.active is None else step.active
            k, v = _gather(k_cache, step.blocks), _gather(v_cache, step.blocks)
            if step.missing is not None:
                v.masked_fill_(step.missing, 0.0)  # another request's NaN times a weight of 0 is NaN
            scores = self._products(tiles[active], k.transpose(2, 3), step.pair, split_size(plan.batch.block_size))
            if cap is not None:
                scores = scores.div_(cap).tanh_().mul_(cap)
            if step.hidden is not None:
                scores.masked_fill_(step.hidden, -torch.inf)
            old_top = top[active]
            new_top = torch.maximum(old_top, scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_top).exp_()
            shrink = torch.exp(old_top - new_top)
            top[active] = new_top
            norm[active] = norm[active] * shrink + weights.sum(-1, keepdim=True)
            total[active] = (total[active] * shrink).add_(self._products(weights, v, step.pair, head_dim))
        out = (total / norm)[:, :, :rows].reshape(num_tiles, num_kv_heads, plan.tokens_per_tile, -1, head_dim)
        return out.transpose(1, 2).reshape(-1, q.shape[1], head_dim)[plan.scatter].to(q.dtype)

    def _products(self, left: Tensor, right: Tensor, pair: tuple[int, ...], width: int) -> Tensor:
        """left[t, h] @ right[pair[t], h], one GEMM of a fixed shape each. -> [tiles, Hkv, rows, width].

        Each takes about 20 us, so two threads would spend their time passing Python's lock to each other (a prefill of
        512 tokens costs 1.97 instead of 1.65 s of CPU).
        """
        out = left.new_empty((*left.shape[:3], width))
        num_heads = left.shape[1]
        lefts, rights, outs = left.flatten(0, 1).unbind(), right.flatten(0, 1).unbind(), out.flatten(0, 1).unbind()

        def multiply(begin: int, end: int) -> None:
            for piece in range(begin, end):
                source = pair[piece // num_heads] * num_heads + piece % num_heads
                torch.mm(lefts[piece], rights[source], out=outs[piece])

        self._pool.run(len(outs), multiply, spread=False)
        return out


def _gather(cache: Cells, blocks: Tensor) -> Tensor:
    """The splits' keys or values as float32. blocks [pairs, B] -> [pairs, Hkv, B * block_size, D]."""
    loaded = load_blocks(cache, blocks.flatten(), torch.float32)
    cells = loaded.view(*blocks.shape, *cache.shape[1:]).transpose(1, 2)
    return cells.reshape(*cells.shape[:2], -1, cells.shape[4])
