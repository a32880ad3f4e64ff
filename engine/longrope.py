"""Phi's rotary embeddings: part of each head only, and LongRoPE ("su") with one fixed set of factors.

LongRoPE (arXiv 2402.13753) divides each frequency by a factor of its own, of which a checkpoint has two sets: short,
for sequences up to the length it was trained with, and long. Hugging Face switches sets when a sequence grows past that
length and computes it anew, so that the keys of a prefix depend on what came after it. Keys in a paged cache can't:
here the set is chosen once, by the longest sequence that the engine serves, as vLLM does. So

    max_model_len <= original    short factors: as Hugging Face at every length
    max_model_len >  original    long factors at every length: as Hugging Face for sequences longer than original
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from engine.rope import RopeConfig

logger = logging.getLogger(__name__)


def read_phi_rope(values: Mapping[str, object], *, head_dim: int, max_position: int, longest: int) -> RopeConfig:
    """From transformers' `rope_parameters`, for sequences of up to `longest` tokens. Raises ValueError.

    `max_position` is the model's own limit: it sets how cos and sin are scaled.
    """
    partial = values.get("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial) if isinstance(partial, int | float) else 0
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(f"partial_rotary_factor is {partial!r}; it must give an even part of a head of {head_dim}")
    whole = {name: value for name, value in values.items() if name != "partial_rotary_factor"}
    part = rotary_dim if rotary_dim < head_dim else None
    if whole.get("rope_type", "default") != "longrope":
        return replace(RopeConfig.read(whole), rotary_dim=part)
    for name in ("short_mscale", "long_mscale"):
        if whole.get(name) is not None:
            raise ValueError(f"{name} is {whole[name]!r}; longrope with it is not supported")
    original = whole.get("original_max_position_embeddings")
    if not isinstance(original, int) or original <= 1:
        raise ValueError(f"original_max_position_embeddings is {original!r}; longrope needs an integer above 1")
    divisors = {name: _factors(whole, name, rotary_dim // 2) for name in ("short_factor", "long_factor")}
    if longest > original:
        logger.warning(
            "longrope: the long factors serve every length, since max_model_len = %d is above the %d tokens that the "
            "model was first trained with; up to that max_model_len the short ones would",
            longest,
            original,
        )
    plain = RopeConfig.read({"rope_type": "default", "rope_theta": whole.get("rope_theta")})
    return replace(
        plain,
        kind="longrope",
        parameters=(("attention_factor", _attention_factor(whole, max_position, original)),),
        rotary_dim=part,
        divisors=divisors["long_factor" if longest > original else "short_factor"],
    )


def _factors(values: Mapping[str, object], name: str, count: int) -> tuple[float, ...]:
    factors = values.get(name)
    if (
        not isinstance(factors, list)
        or len(factors) != count
        or not all(isinstance(each, int | float) and each > 0 for each in factors)
    ):
        raise ValueError(f"{name} is {str(factors)[:60]}; longrope needs a list of {count} positive numbers")
    return tuple(float(each) for each in factors)


def _attention_factor(values: Mapping[str, object], max_position: int, original: int) -> float:
    """What cos and sin are multiplied with; the paper's, unless the config says another."""
    for name in ("attention_factor", "factor"):
        value = values.get(name)
        if value is not None and (not isinstance(value, int | float) or value <= 0):
            raise ValueError(f"{name} is {value!r}; it must be a positive number")
    given, factor = values.get("attention_factor"), values.get("factor")
    if isinstance(given, int | float):
        return float(given)
    ratio = float(factor) if isinstance(factor, int | float) else max_position / original
    return 1.0 if ratio <= 1.0 else math.sqrt(1 + math.log(ratio) / math.log(original))
