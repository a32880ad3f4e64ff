"""Multi-head latent attention (MLA) as config.json describes it: DeepSeek-V2's and V3's fields."""

import math
from dataclasses import dataclass
from typing import Any

MLA_FAMILIES = ("deepseek_v2", "deepseek_v3")
_MAX_CELL_DIM = 1024  # what the native kernels keep of a head on their stack


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Sizes of one layer's attention; a token's cell is its latent and one rotated key, the same for all heads.

    q_lora_rank    queries come from a latent of their own of this size; None: from the hidden state
    latent_dim     of what keys and values are made of (kv_lora_rank)
    key_dim        of a head's key without position (qk_nope_head_dim)
    rope_dim       of the rotated key (qk_rope_head_dim)
    value_dim      of a head's value (v_head_dim)
    interleaved    the rotated pairs are (2 i, 2 i + 1), not (i, i + rope_dim / 2)
    """

    q_lora_rank: int | None
    latent_dim: int
    key_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def cell_dim(self) -> int:
        """Numbers that the cache has of a token in a layer."""
        return self.latent_dim + self.rope_dim

    @staticmethod
    def read(text: Any, family: str) -> "MlaConfig":
        """From transformers' config. Raises ValueError naming the field at fault."""
        rank = None if text.q_lora_rank is None else _size(text, "q_lora_rank")
        rope_dim, latent_dim = _size(text, "qk_rope_head_dim"), _size(text, "kv_lora_rank")
        if latent_dim + rope_dim > _MAX_CELL_DIM:
            raise ValueError(
                f"kv_lora_rank + qk_rope_head_dim is {latent_dim} + {rope_dim}; it must be at most {_MAX_CELL_DIM}"
            )
        kv_heads, heads = text.num_key_value_heads, text.num_attention_heads
        if kv_heads != heads:
            raise ValueError(
                f"num_key_value_heads is {kv_heads}; with latent attention it must be {heads}, as the heads"
            )
        if getattr(text, "sliding_window", None) is not None:
            raise ValueError(f"sliding_window is {text.sliding_window!r}; with latent attention there can be none")
        # V2 has no such field: what a config.json says of it counts for nothing there.
        interleaved = family == "deepseek_v2" or bool(getattr(text, "rope_interleave", True))
        return MlaConfig(
            rank, latent_dim, _size(text, "qk_nope_head_dim"), rope_dim, _size(text, "v_head_dim"), interleaved
        )

    def attention_scale(self, rope_parameters: Any) -> float:
        """What multiplies q·k: of the whole key's size, and of YaRN's `mscale_all_dim` where the rope has one."""
        scale = math.pow(self.key_dim + self.rope_dim, -0.5)
        all_dim, factor = (float(rope_parameters.get(name) or 0) for name in ("mscale_all_dim", "factor"))
        if rope_parameters.get("rope_type", "default") == "default" or not all_dim or factor <= 1:
            return scale
        mscale = 0.1 * all_dim * math.log(factor) + 1.0
        return scale * mscale * mscale

    def kv_config(self) -> list[object]:
        """As JSON types."""
        return [
            self.q_lora_rank, self.latent_dim, self.key_dim, self.rope_dim, self.value_dim, self.interleaved,
        ]  # fmt: skip


def _size(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    return value
