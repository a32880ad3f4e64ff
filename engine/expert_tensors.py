"""The stored forms of experts' matrices, under one set of names: `….mlp.experts.<e>.{gate,up,down}_proj.weight`.

the hub's Qwen3-MoE    ….mlp.experts.<e>.{gate,up,down}_proj.weight
the hub's Mixtral      ….block_sparse_moe.experts.<e>.{w1,w3,w2}.weight
fused (transformers 5) ….mlp.experts.gate_up_proj [experts, 2 · ffn, hidden], ….mlp.experts.down_proj
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from engine.safetensors_file import TensorEntry

_MIXTRAL = re.compile(r"(.*\.experts\.\d+)\.(w[123])(\..*)")
_KINDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def by_expert(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries with each expert's matrices under their own names; those of a fused tensor are parts of it."""
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if ".block_sparse_moe." in name:
            found[_of_mixtral(name)] = entry
        elif (match := _FUSED.fullmatch(name)) and len(entry.shape) == 3:
            kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
            found |= _parts(match[1], kinds, entry)
        else:
            found[name] = entry
    return found


def _of_mixtral(name: str) -> str:
    name = name.replace(".block_sparse_moe.", ".mlp.")
    match = _MIXTRAL.fullmatch(name)
    return name if match is None else f"{match[1]}.{_KINDS[match[2]]}{match[3]}"


def _parts(prefix: str, kinds: tuple[str, ...], entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """Equal pieces of the tensor's bytes: experts one after another, in each the kinds one below the other."""
    num_experts, rows, columns = entry.shape
    num_parts = num_experts * len(kinds)
    if num_parts == 0 or rows % len(kinds):
        yield entry.name, entry
        return
    size = entry.num_bytes // num_parts
    for part in range(num_parts):
        expert, kind = divmod(part, len(kinds))
        begin = entry.begin + part * size
        name = f"{prefix}.{expert}.{kinds[kind]}.weight"
        yield name, replace(entry, shape=(rows // len(kinds), columns), begin=begin, end=begin + size)
