"""GGUF's Q4_0 and Q8_0 not expanded: numbers and scales apart, to the bit (`engine/quantized/gguf.py` reads them).

Matrices over one input (q, k and v; gate and up) are kept so all or none, as numbers of one kind: where Q4_0 meets Q8_0
it takes eight bits a number too. All other types are expanded to the compute dtype, as the conversion does.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Kind = Literal["int4", "int8"]

_KINDS: Mapping[GGMLQuantizationType, Kind] = {GGMLQuantizationType.Q4_0: "int4", GGMLQuantizationType.Q8_0: "int8"}
_TOGETHER = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
_SCALE_BYTES = 2


def kinds(types: Mapping[str, GGMLQuantizationType]) -> dict[str, Kind]:
    """Of the matrices that stay packed, by name, from the types of all ("model.layers.0.….weight")."""
    found = {name: _KINDS[kind] for name, kind in types.items() if kind in _KINDS}
    for names in _sets(types):
        of_set = {found.get(name) for name in names}
        if len(of_set) > 1:
            for name in names:
                found.pop(name, None)
            if None not in of_set:
                found |= dict.fromkeys(names, "int8")
    return found


def _sets(names: Iterable[str]) -> list[list[str]]:
    sets: dict[tuple[str, int], list[str]] = {}
    for name in names:
        for number, parts in enumerate(_TOGETHER):
            for part in parts:
                if name.endswith(f".{part}.weight"):
                    sets.setdefault((name.removesuffix(f"{part}.weight"), number), []).append(name)
    return list(sets.values())


def scales(data: NDArray[np.uint8], stored: GGMLQuantizationType) -> NDArray[np.float16]:
    """Those of blocks uint8 [rows, bytes] -> [rows, K / 32]."""
    return np.ascontiguousarray(_blocks(data, stored)[..., :_SCALE_BYTES]).view(np.float16)[..., 0]


def numbers(data: NDArray[np.uint8], stored: GGMLQuantizationType, kind: Kind) -> NDArray[np.generic]:
    """Those of blocks uint8 [rows, bytes] -> uint8 [rows, K / 2] for "int4" or int8 [rows, K]."""
    rows = len(data)
    codes = _blocks(data, stored)[..., _SCALE_BYTES:]
    if stored == GGMLQuantizationType.Q8_0:
        return np.ascontiguousarray(codes).view(np.int8).reshape(rows, -1)
    codes = np.concatenate((codes & 15, codes >> 4), axis=2).reshape(rows, -1)  # the first 16, then the others
    if kind == "int8":
        return codes.astype(np.int8) - np.int8(8)
    packed = codes ^ 8  # code - 8 in four bits
    return packed[:, 0::2] | packed[:, 1::2] << 4


def _blocks(data: NDArray[np.uint8], stored: GGMLQuantizationType) -> NDArray[np.uint8]:
    block_bytes = _SCALE_BYTES + (16 if stored == GGMLQuantizationType.Q4_0 else 32)
    return np.ascontiguousarray(data).reshape(len(data), -1, block_bytes)
