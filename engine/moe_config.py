"""A mixture of experts as config.json describes it: Mixtral's and Qwen3-MoE's fields, in one form."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """`layers` says of each layer whether it has experts (else a plain MLP of the model's intermediate_size).

    `normalize`: a row's weights are scaled to a sum of 1 after the best `top_k` are picked.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool
    layers: tuple[bool, ...]

    @staticmethod
    def read(text: Any, family: str, num_layers: int) -> "MoeConfig":
        """From transformers' config. Raises ValueError naming the field at fault."""
        num_experts, top_k = _count(text, "num_experts", "num_local_experts"), _count(text, "num_experts_per_tok")
        if top_k > num_experts:
            raise ValueError(f"num_experts_per_tok is {top_k}; it must be at most the number of experts, {num_experts}")
        if family == "mixtral":
            every = (True,) * num_layers
            return MoeConfig(num_experts, top_k, _count(text, "intermediate_size"), True, every)
        dense, step = text.mlp_only_layers or [], _count(text, "decoder_sparse_step")
        if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in dense):
            raise ValueError(f"mlp_only_layers is {dense!r}; it must list layers from 0 to {num_layers - 1}")
        layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
        size = _count(text, "moe_intermediate_size")
        return MoeConfig(num_experts, top_k, size, bool(text.norm_topk_prob), layers)

    def kv_config(self) -> list[object]:
        """As JSON types."""
        return [self.num_experts, self.top_k, self.intermediate_size, self.normalize, list(self.layers)]


def _count(text: Any, *names: str) -> int:
    """A positive integer under the first of these names that there is."""
    name = next((each for each in names if getattr(text, each, None) is not None), names[0])
    value = getattr(text, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    return value
