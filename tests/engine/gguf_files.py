"""Writes GGUF files out of tiny Hugging Face models, with llama.cpp's conventions, for the converter to invert."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.tiny_models import make_tiny_model

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_tensor(name: str, value: NDArray[np.float32], config: dict[str, Any]) -> tuple[str, NDArray[np.float32]]:
    """A Hugging Face tensor under its GGUF name, as llama.cpp stores it."""
    gemma = config["model_type"] == "gemma3_text"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        found = _TOP[stem]
    else:
        _, _, layer, part = stem.split(".", 3)
        found = f"blk.{layer}.{(_PARTS | _GEMMA_PARTS if gemma else _PARTS)[part]}"
    if gemma and stem.endswith("norm"):
        value = value + np.float32(1.0)
    if config["model_type"] == "llama" and found.endswith((".attn_q", ".attn_k")):
        heads = config["num_attention_heads" if found.endswith("_q") else "num_key_value_heads"]
        split = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        value = split.swapaxes(1, 2).reshape(value.shape)
    return f"{found}.{kind}", value


K_SCALES = {GGMLQuantizationType.Q4_K: (0, 2), GGMLQuantizationType.Q5_K: (0, 2), GGMLQuantizationType.Q6_K: (208,)}
"""Of the types that `gguf` reads but does not write: where a block's float16 scales are."""


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of every code, with scales that make weights of a model's size."""
    numbers, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng([seed, rows, columns])
    blocks = generator.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    for place in K_SCALES.get(kind, (0,)):
        scales = generator.uniform(0.5, 1.0, blocks.shape[:2]) * columns**-0.5 / (2000 if kind in K_SCALES else 64)
        blocks[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    family: str,
    directory: Path,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tensors: dict[str, NDArray[np.float32]] | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Makes a tiny model of `family`; returns (its directory, the same model as a GGUF file).

    `extra` sets metadata keys of the architecture, `drop` leaves tensors out, `tensors` adds some, `kinds` has the type
    of matrices whose names contain a text.
    """
    model = make_tiny_model(family, directory / "original", **overrides)
    config = json.loads((model / "config.json").read_text())
    path = directory / "model.gguf"
    writer = GGUFWriter(path, family)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_array(
            "gemma3.attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config["layer_types"]]
        )
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{family}.{key}", value)
    _write_tokenizer(writer, model)
    weights = dict(gguf_tensor(name, value, config) for name, value in load_file(model / "model.safetensors").items())
    for name, value in (weights | (tensors or {})).items():
        if name in drop:
            continue
        wanted = next((kind for part, kind in (kinds or {}).items() if part in name), quantization)
        block = 256 if wanted in K_SCALES else 32
        kind = wanted if value.ndim == 2 and value.shape[1] % block == 0 else GGMLQuantizationType.F32
        data = random_blocks(kind, *value.shape) if kind in K_SCALES else quantize(value, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def _write_tokenizer(writer: GGUFWriter, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    stored = json.loads((model / "tokenizer.json").read_text())
    config = json.loads((model / "tokenizer_config.json").read_text())
    special = {token["id"] for token in stored["added_tokens"]}
    size = tokenizer.get_vocab_size()
    tokens = [str(tokenizer.id_to_token(index)) for index in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if index in special else TokenType.NORMAL for index in range(size)])
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<bos>"))
    writer.add_eos_token_id(tokens.index("<eos>"))
    writer.add_pad_token_id(tokens.index("<pad>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(config["chat_template"])
