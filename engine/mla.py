"""Multi-head latent attention: the cache has one latent and one rotated key of a token for all heads, not K and V.

    cell = [norm(c), rope(k)]                     c [latent_dim], k [rope_dim] from the hidden state: one for all heads
    q'_h = [q_h U_h, rope(q_h)]                   U_h [key_dim, latent_dim] would have made head h's key of c
    o_h  = V_h (sum of softmax(q'_h · cell) c)    V_h [value_dim, latent_dim] would have made its value

So the keys' and the values' matrices are applied to queries and to results ("absorbed"), and attention is that of many
query heads over one kv head whose values are the first numbers of its keys. It is done so in prefill as in decode:
a token's bits can't depend on which of the two it was in. The price is in prefill: cells are longer than keys.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.layers import RmsNorm, RowLinear, StepContext
from engine.mla_config import MlaConfig
from engine.model_config import ModelConfig
from engine.weight_source import Piece, Projection, WeightSource
from kernels.kv_cells import store_rows
from kernels.latent import rotate_pairs, unrotate_values
from kernels.products import Product

_NORM_EPS = 1e-6  # of the latents' norms, whatever the model's is


class LatentAttention:
    """Causal self-attention over the paged cache of latents; adapters may change all but what is absorbed."""

    def __init__(
        self,
        kernels: ModelKernels,
        weights: WeightSource,
        name: str,
        layer: int,
        config: ModelConfig,
        mla: MlaConfig,
    ) -> None:
        self._kernels, self._config, self._mla, self._layer = kernels, config, mla, layer
        self._rope = config.layer_ropes[layer]
        hidden, heads, rank = config.hidden_size, config.num_heads, mla.q_lora_rank
        norms, bias = replace(config, norm_eps=_NORM_EPS), config.qkv_bias
        q_size = heads * (mla.key_dim + mla.rope_dim)
        self._q_names: tuple[str, ...] = (f"{name}.q_proj" if rank is None else f"{name}.q_b_proj",)
        self._q_a_names: tuple[str, ...] = (f"{name}.q_a_proj",)
        self._kv_names: tuple[str, ...] = (f"{name}.kv_a_proj_with_mqa",)
        self.q_a: Any = None
        if rank is not None:
            self.q_a = weights.pack(Projection(self._q_a_names, (rank,), hidden, bias=bias))
            self.q_norm = RmsNorm(kernels, weights, f"{name}.q_a_layernorm", rank, norms)
        self.q = weights.pack(Projection(self._q_names, (q_size,), hidden if rank is None else rank))
        self.kv = weights.pack(Projection(self._kv_names, (mla.cell_dim,), hidden, bias=bias))
        self.kv_norm = RmsNorm(kernels, weights, f"{name}.kv_a_layernorm", mla.latent_dim, norms)
        self.to_latent, self.to_values = _absorbed(weights, f"{name}.kv_b_proj", heads, mla)
        output = Projection((f"{name}.o_proj",), (hidden,), heads * mla.value_dim, bias=config.output_bias)
        self.o = RowLinear(kernels, weights, output, config)

    def __call__(self, x: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        """The output projection's result, plus the residual if there is one. x [T, hidden] -> [T, hidden]."""
        mla, heads, linear = self._mla, self._config.num_heads, self._kernels.linear
        group = step.memory.layer_groups[self._layer]
        cells, _ = step.memory.layer(self._layer)
        queries = self._queries(x, step).view(x.shape[0], heads, -1)
        kv = linear(x, self.kv, lora=step.lora(self._kv_names))
        to_turn = torch.cat((queries[..., mla.key_dim :], kv[:, None, mla.latent_dim :]), dim=1)
        turned = rotate_pairs(to_turn, *step.tables[self._rope], interleaved=mla.interleaved)
        cell = torch.cat((self.kv_norm(kv[:, : mla.latent_dim]), turned[:, heads]), dim=1)
        store_rows(cells, cell[:, None], step.batch.of_group(group))
        absorbed = x.new_empty(x.shape[0], heads, mla.cell_dim)
        absorbed[..., mla.latent_dim :] = turned[:, :heads]
        self._kernels.linear_each(
            [
                Product(queries[:, head, : mla.key_dim], weight, absorbed[:, head, : mla.latent_dim])
                for head, weight in enumerate(self.to_latent)
            ]
        )
        plan = step.plans[group, None]
        scale, cap = self._config.attention_scale, self._config.attention_cap
        attended = self._kernels.paged_attention(absorbed, cells, cells, plan, scale=scale, cap=cap)
        latents = unrotate_values(attended, cells)[..., : mla.latent_dim]
        values = x.new_empty(x.shape[0], heads, mla.value_dim)
        self._kernels.linear_each(
            [Product(latents[:, head], weight, values[:, head]) for head, weight in enumerate(self.to_values)]
        )
        return self.o(values.view(x.shape[0], -1), step, residual)

    def _queries(self, x: Tensor, step: StepContext) -> Tensor:
        if self.q_a is not None:
            x = self.q_norm(self._kernels.linear(x, self.q_a, lora=step.lora(self._q_a_names)))
        return self._kernels.linear(x, self.q, lora=step.lora(self._q_names))


def _absorbed(weights: WeightSource, stored: str, heads: int, mla: MlaConfig) -> tuple[list[Any], list[Any]]:
    """Of each head Uᵀ [latent_dim, key_dim] and V [value_dim, latent_dim]; U and V lie one below the other there."""
    rows = mla.key_dim + mla.value_dim
    shape = (heads * rows, mla.latent_dim)
    to_latent, to_values = [], []
    for head in range(heads):
        begin = head * rows
        keys = Piece(stored, shape, range(begin, begin + mla.key_dim), transposed=True)
        values = Piece(stored, shape, range(begin + mla.key_dim, begin + rows))
        name = f"{stored}.{head}"
        to_latent.append(weights.pack(Projection.of_piece(f"{name}.keys", keys)))
        to_values.append(weights.pack(Projection.of_piece(f"{name}.values", values)))
    return to_latent, to_values
