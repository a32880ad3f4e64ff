"""What latent attention needs beside the ops of others: rotation by pairs, and the oracle that absorbs nothing.

All of it is correctly rounded elementwise operations, so a row depends on itself alone, on any device.
"""

import torch
from torch import Tensor

from kernels.kv_cells import Cells, QuantizedCells, rotate


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the pairs (x[2 i], x[2 i + 1]) or (x[i], x[i + D / 2]). x [T, H, D], cos and sin [T, D / 2] -> [T, H, D].

    The result has the firsts of all pairs, then the seconds: another order than an interleaved x had, the same for
    queries and keys, which changes no product.
    """
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def unrotate_values(sums: Tensor, cells: Cells) -> Tensor:
    """Weighted sums of `cells` as if they had been stored as they are: int8's are rotated (kv_cells.py). [..., D]."""
    if not isinstance(cells, QuantizedCells) or not cells.rotated:
        return sums
    size = sums.shape[-1]
    return (rotate(sums.float()) / (size & -size)).to(sums.dtype)


def expanded_attention(
    q: Tensor, latents: Tensor, rotated: Tensor, keys: Tensor, values: Tensor, *, scale: float
) -> Tensor:
    """The oracle: each head's keys and values made of the latents, causal softmax, in float64.

    q [T, H, key_dim + rope_dim], latents [T, latent_dim], rotated [T, rope_dim], keys [H, key_dim, latent_dim],
    values [H, value_dim, latent_dim] -> float64 [T, H, value_dim].
    """
    wide, num_tokens = latents.double(), len(latents)
    made = torch.einsum("tl,hkl->htk", wide, keys.double())
    whole = torch.cat((made, rotated.double().expand(len(keys), -1, -1)), dim=-1)
    scores = torch.einsum("thd,hsd->hts", q.double(), whole) * scale
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,sl,hvl->thv", weights, wide, values.double())
