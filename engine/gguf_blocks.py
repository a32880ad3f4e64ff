"""Which of GGUF's quantized matrices stay as they are, and as what (`engine/quantized/gguf.py` reads their blocks).

Matrices over one input are kept all or none: q, k and v each as it is, gate and up as numbers of one kind. Where
these differ, types with a float16 for 32 numbers take eight bits a number; the K types, whose scales have two levels,
are then expanded to the compute dtype, as all other types are.
"""

from collections.abc import Iterable, Mapping

from gguf import GGMLQuantizationType

from kernels.grouped import Numbers

_KINDS: Mapping[GGMLQuantizationType, Numbers] = {
    GGMLQuantizationType.Q4_0: "int4",
    GGMLQuantizationType.Q5_0: "int5",
    GGMLQuantizationType.Q8_0: "int8",
    GGMLQuantizationType.Q4_K: "uint4",
    GGMLQuantizationType.Q5_K: "uint5",
    GGMLQuantizationType.Q6_K: "int6",
}
_WIDENED = ("int4", "int5", "int8")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")


def kinds(types: Mapping[str, GGMLQuantizationType]) -> dict[str, Numbers]:
    """Of the matrices that stay packed, by name, from the types of all ("model.layers.0.….weight")."""
    found = {name: _KINDS[kind] for name, kind in types.items() if kind in _KINDS}
    for names in _sets(types, _QKV):
        if any(name not in found for name in names):
            for name in names:
                found.pop(name, None)
    for names in _sets(types, _GATED):
        of_set = {found.get(name) for name in names}
        if len(of_set) > 1:
            for name in names:
                found.pop(name, None)
            if of_set <= set(_WIDENED):
                found |= dict.fromkeys(names, "int8")
    return found


def _sets(names: Iterable[str], parts: tuple[str, ...]) -> list[list[str]]:
    """The names that are such parts of one layer."""
    sets: dict[str, list[str]] = {}
    for name in names:
        for part in parts:
            if name.endswith(f".{part}.weight"):
                sets.setdefault(name.removesuffix(f"{part}.weight"), []).append(name)
    return list(sets.values())
