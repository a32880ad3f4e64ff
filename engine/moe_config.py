"""A mixture of experts as config.json describes it: Mixtral's, Qwen3-MoE's and DeepSeek's fields, in one form."""

from dataclasses import dataclass
from typing import Any

from engine.mla_config import MLA_FAMILIES
from kernels.routing import GroupLimit, Scoring

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
    deepseek: "DeepseekMoe | None" = None

    @staticmethod
    def read(text: Any, family: str, num_layers: int) -> "MoeConfig":
        """From transformers' config. Raises ValueError naming the field at fault."""
        num_experts, top_k = _count(text, *_NUM_EXPERTS), _count(text, "num_experts_per_tok")
        if top_k > num_experts:
            raise ValueError(f"num_experts_per_tok is {top_k}; it must be at most the number of experts, {num_experts}")
        if family in MLA_FAMILIES:
            return _read_deepseek(text, family, num_experts, top_k, num_layers)
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
        own = [] if self.deepseek is None else [self.deepseek.kv_config()]
        return [self.num_experts, self.top_k, self.intermediate_size, self.normalize, list(self.layers), *own]


@dataclass(frozen=True, slots=True)
class DeepseekMoe:
    """What its routing has of its own. With sigmoid scores a bias for each expert takes part in the choice.

    `scale` multiplies the weights; `shared_size`: of the MLP through which every row goes too, 0 for none.
    """

    scoring: Scoring
    limit: GroupLimit | None
    scale: float
    shared_size: int

    def kv_config(self) -> list[object]:
        """As JSON types."""
        limit = self.limit
        groups = None if limit is None else [limit.num_groups, limit.most, limit.best]
        return [self.scoring, groups, self.scale, self.shared_size]


def _read_deepseek(text: Any, family: str, num_experts: int, top_k: int, num_layers: int) -> MoeConfig:
    dense, frequency = text.first_k_dense_replace, getattr(text, "moe_layer_freq", 1)
    if not isinstance(dense, int) or dense < 0:
        raise ValueError(f"first_k_dense_replace is {dense!r}; it must be a number of layers")
    if frequency != 1:
        raise ValueError(f"moe_layer_freq is {frequency!r}; only 1 is supported")
    scoring: Scoring = "softmax" if family == "deepseek_v2" else "sigmoid"
    methods = ("greedy", "group_limited_greedy") if family == "deepseek_v2" else ("noaux_tc",)
    method = getattr(text, "topk_method", methods[0])
    for name, value, supported in (
        ("topk_method", method, methods),
        ("scoring_func", getattr(text, "scoring_func", scoring), (scoring,)),
    ):
        if value not in supported:
            raise ValueError(f"{name} is {value!r}; with this architecture it must be {' or '.join(supported)}")
    normalize, scale = bool(text.norm_topk_prob), text.routed_scaling_factor
    if normalize and family == "deepseek_v2":
        raise ValueError("norm_topk_prob is true; DeepSeek-V2's own code and transformers' disagree on what that does")
    if not isinstance(scale, int | float) or scale <= 0:
        raise ValueError(f"routed_scaling_factor is {scale!r}; it must be a positive number")
    limit = None if method == "greedy" else _group_limit(text, num_experts, top_k, 1 if family == "deepseek_v2" else 2)
    size, shared = _count(text, "moe_intermediate_size"), text.n_shared_experts or 0
    own = DeepseekMoe(scoring, limit, float(scale), size * shared)
    return MoeConfig(num_experts, top_k, size, normalize, tuple(layer >= dense for layer in range(num_layers)), own)


def _group_limit(text: Any, num_experts: int, top_k: int, best: int) -> GroupLimit | None:
    """None where every group may be used."""
    groups, most = _count(text, "n_group"), _count(text, "topk_group")
    if num_experts % groups or num_experts // groups < best:
        raise ValueError(f"n_group is {groups}; it must divide {num_experts} experts into groups of {best} at least")
    if most > groups or most * (num_experts // groups) < top_k:
        raise ValueError(
            f"topk_group is {most}; it must be at most n_group, {groups}, and leave {top_k} experts to choose from"
        )
    return GroupLimit(groups, most, best) if most < groups else None


def _count(text: Any, *names: str) -> int:
    """A positive integer under the first of these names that there is."""
    name = next((each for each in names if getattr(text, each, None) is not None), names[0])
    value = getattr(text, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    return value
