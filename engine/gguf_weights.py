"""Writes GGUF tensors one by one into a safetensors file under Hugging Face's names, dequantized or packed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf.gguf_reader import ReaderTensor
from numpy.typing import NDArray

from engine.gguf_blocks import kinds
from engine.gguf_reader import GgufFile
from kernels.grouped import Numbers

SAFETENSORS_TYPES = {"bfloat16": "BF16", "float32": "F32"}

_ROW_BYTES = {"bfloat16": 2, "float32": 4}
_PIECE_ELEMENTS = 4 << 20  # 16 MiB of float32: what is in memory at a time of a large matrix
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORM_NAMES = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
_DEFAULT_NORM_NAMES = {"ffn_norm": "post_attention_layernorm"}
_IGNORED = ("rope_freqs.weight",)  # part of config.json


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a GGUF tensor goes, and how its rows and values change on the way."""

    name: str
    source: ReaderTensor
    shape: tuple[int, ...]
    row_order: NDArray[np.int64] | None
    offset: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the safetensors file, and its content piece by piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    pieces: Callable[[], Iterator[NDArray[Any]]]


def packed_kinds(file: GgufFile, config: dict[str, Any]) -> dict[str, Numbers]:
    """The matrices that stay packed, by Hugging Face's name."""
    return kinds(
        {target.name: target.source.tensor_type for target in _targets(file, config) if len(target.shape) == 2}
    )


def write_safetensors(
    file: GgufFile,
    config: dict[str, Any],
    path: Path,
    *,
    dtype: str,
    packed: dict[str, Numbers],
    progress: Callable[[int, int], None],
) -> None:
    """Writes all tensors of `file` to `path`, those in `packed` as they are, the others in `dtype`.

    `progress(bytes done, bytes in all)` is called as it goes.
    """
    entries: list[_Entry] = []
    for target in _targets(file, config):
        if kind := packed.get(target.name):
            entries += _packed(target, kind)
        else:
            entries.append(_dense(file, target, dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for entry in entries:
            for piece in entry.pieces():
                done += _write(out, piece, entry.dtype)
                progress(done, end)


def _dense(file: GgufFile, target: _Target, dtype: str) -> _Entry:
    size = int(np.prod(target.shape)) * _ROW_BYTES[dtype]
    return _Entry(target.name, SAFETENSORS_TYPES[dtype], target.shape, size, lambda: _pieces(file, target))


def _packed(target: _Target, kind: Numbers) -> tuple[_Entry, _Entry]:
    """The blocks as they are; `engine/quantized/gguf.py` says what the type's tensor has."""
    module = target.name.removesuffix(".weight")
    rows = target.shape[0]
    width = target.source.data.shape[1]
    stored = GGMLQuantizationType(target.source.tensor_type)
    form = np.array([[stored.value, 8 if kind == "int8" else 0]], dtype=np.uint8)
    return (
        _Entry(f"{module}.blocks", "U8", (rows, width), rows * width, lambda: _stored_pieces(target)),
        _Entry(f"{module}.type", "U8", (2,), 2, lambda: iter([form])),
    )


def _targets(file: GgufFile, config: dict[str, Any]) -> list[_Target]:
    expected = _expected_shapes(config)
    targets = []
    for name, tensor in file.tensors.items():
        if name in _IGNORED:
            continue
        hf_name = _hf_name(file, name)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if hf_name is None or hf_name not in expected:
            raise file.error(name, f"tensor is not part of the architecture {file.architecture!r}")
        if shape != expected[hf_name]:
            raise file.error(name, f"shape {list(shape)} where the metadata asks for {list(expected[hf_name])}")
        offset = -1.0 if file.architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        targets.append(_Target(hf_name, tensor, shape, _row_order(file, name, config), offset))
    present = {target.name for target in targets}
    for hf_name in expected:
        if hf_name not in present and not hf_name.endswith(".bias"):
            raise file.error(hf_name, "tensor is missing")
    return targets


def _hf_name(file: GgufFile, name: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    names = _LAYER_NAMES | _NORM_NAMES.get(file.architecture, _DEFAULT_NORM_NAMES)
    if block != "blk" or part not in names or kind not in ("weight", "bias"):
        return None
    return f"model.layers.{layer}.{names[part]}.{kind}"


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor the model may have; only biases are optional (their presence is in the config)."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    has_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    gemma = config["model_type"] == "gemma3_text"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, hidden)
            if has_bias:
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, queries)
        if has_bias and config["model_type"] != "qwen2":
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if gemma or config["model_type"] == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, ffn)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        shapes |= {f"{prefix}.{norm}.weight": (hidden,) for norm in norms}
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def _row_order(file: GgufFile, name: str, config: dict[str, Any]) -> NDArray[np.int64] | None:
    """Undoes llama.cpp's rope permutation of Llama's q and k: its rows interleave the halves that rotate together."""
    if file.architecture != "llama" or not any(part in name for part in (".attn_q.", ".attn_k.")):
        return None
    heads = config["num_attention_heads"] if ".attn_q." in name else config["num_key_value_heads"]
    head_dim = config["head_dim"]
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _pieces(file: GgufFile, target: _Target) -> Iterator[NDArray[np.float32]]:
    """Dequantized values of a tensor, some rows at a time."""
    for data in _stored_pieces(target):
        try:
            values = dequantize(data, GGMLQuantizationType(target.source.tensor_type))
        except NotImplementedError as error:
            kind = target.source.tensor_type.name
            raise file.error(target.source.name, f"quantization {kind} can't be dequantized") from error
        yield values + np.float32(target.offset) if target.offset else values


def _stored_pieces(target: _Target) -> Iterator[NDArray[Any]]:
    """A tensor's data as it is stored, some rows at a time, in the order they go to."""
    data = target.source.data if len(target.shape) > 1 else target.source.data.reshape(target.shape[0], -1)
    rows_at_once = max(1, _PIECE_ELEMENTS // int(np.prod(target.shape[1:])))
    for start in range(0, len(data), rows_at_once):
        rows: slice | NDArray[np.int64] = slice(start, start + rows_at_once)
        if target.row_order is not None:
            rows = target.row_order[start : start + rows_at_once]
        yield data[rows]


def _write(out: BinaryIO, values: NDArray[Any], dtype: str) -> int:
    """Appends values, rounded to nearest even for bfloat16; returns the number of bytes."""
    if dtype == "BF16":
        rounded = torch.from_numpy(np.require(values, requirements=("C", "W"))).to(torch.bfloat16)
        return out.write(rounded.view(torch.uint8).numpy().data)
    return out.write(np.ascontiguousarray(values).view(np.uint8).data)
