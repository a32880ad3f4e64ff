"""Rotary position embeddings: the variants of the served families, as inverse frequencies and a scale."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One layer kind's rotary embedding; `parameters` are the numbers its kind needs, sorted by name."""

    kind: str
    theta: float
    parameters: tuple[tuple[str, float], ...] = ()
    rotary_dim: int | None = None
    """The leading dimensions of a head that are rotated; None: all."""
    divisors: tuple[float, ...] = ()
    """Of "longrope": what each frequency is divided by."""

    @property
    def identity(self) -> list[object]:
        """All of it as JSON types, for the block keys' root."""
        values: list[object] = [self.kind, self.theta, dict(self.parameters)]
        if self.rotary_dim is not None or self.divisors:
            values += [self.rotary_dim, list(self.divisors)]
        return values

    @staticmethod
    def read(values: Mapping[str, object]) -> "RopeConfig":
        """From transformers' `rope_parameters`. Raises ValueError naming the field at fault."""
        kind = str(values.get("rope_type", "default"))
        if kind not in ROPE_KINDS:
            raise ValueError(f"rope_type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
        partial = values.get("partial_rotary_factor")
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
        theta = values.get("rope_theta")
        if not isinstance(theta, int | float) or theta <= 0:
            raise ValueError(f"rope_theta is {theta!r}; it must be a positive number")
        parameters: dict[str, float] = {}
        for name in _REQUIRED.get(kind, ()):
            value = values.get(name)
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"rope_type {kind!r} needs a positive number {name}, not {value!r}")
            parameters[name] = float(value)
        if kind == "yarn":
            for name in _OPTIONAL:
                value = values.get(name)
                if isinstance(value, int | float):
                    parameters[name] = float(value)
        return RopeConfig(kind, float(theta), tuple(sorted(parameters.items())))


@cache
def rotary_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Of `num_heads` heads side by side, the order in which the ops' pairs (i, i + head_dim / 2) are those to rotate.

    The ops rotate whole heads; those of which only a part turns pair i with i + rotary_dim / 2 in it. So their first
    half gets the firsts of all pairs, the second half the seconds; the dimensions that stay are paired at the end, with
    cos 1 and sin 0. What is the same for queries and keys changes no product. int64 [num_heads * head_dim].
    """
    turned, all_dims = rotary_dim // 2, torch.arange(head_dim)
    rest = all_dims[rotary_dim:]
    first = torch.cat((all_dims[:turned], rest[: len(rest) // 2]))
    second = torch.cat((all_dims[turned:rotary_dim], rest[len(rest) // 2 :]))
    head = torch.cat((first, second))
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


@cache
def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """(float32 [rotated / 2], the factor of cos and sin). Computed once, not in each step (0.15 ms): read-only.

    `dynamic` stretches the base only beyond the model's max_position_embeddings, and differently at each length, so
    that keys in the cache would depend on when they were written. Sequences end at that limit here, where it has no
    effect.
    """
    parameters = dict(rope.parameters)
    rotated = rope.rotary_dim or head_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors) * rope.theta**exponents), parameters["attention_factor"]
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(inv_freq, parameters), 1.0
    if rope.kind == "yarn":
        return _yarn(rope.theta, exponents, rotated, parameters)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, parameters: Mapping[str, float]) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between (transformers' formula)."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    ramp = (original / wavelength - low) / (high - low)
    smooth = (1 - ramp) * scaled / factor + ramp * scaled
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, smooth, scaled)


def _yarn(theta: float, exponents: Tensor, rotated: int, parameters: Mapping[str, float]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate the slow dimensions, keep the fast ones, scale cos and sin."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    frequencies = theta**exponents
    inv_freq = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
    return inv_freq, parameters.get("attention_factor") or _yarn_scale(factor, parameters)


def _yarn_scale(factor: float, parameters: Mapping[str, float]) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
