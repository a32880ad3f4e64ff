"""From GGUF metadata to Hugging Face's config.json, per architecture. Conventions: llama.cpp's converter, inverted."""

from typing import Any

import numpy as np

from engine.gguf_reader import GgufFile

ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")

_GEMMA3_PERIOD = 6  # every sixth layer is global; files do not always say so
_END_OF_TURN_TOKENS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
_GEMMA3_27B_LAYERS = 62  # the one size whose query scale is not its head size


def hf_config(file: GgufFile, *, dtype: str) -> dict[str, Any]:
    """config.json for the model in `file`."""
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise file.error("general.architecture", f"{arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if file.integer(f"{arch}.expert_count", 0) > 0:
        raise file.error(f"{arch}.expert_count", "mixture-of-experts models are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("token_embd.weight", "tensor is missing" if embedding is None else "is not a matrix")
    num_layers = file.positive(f"{arch}.block_count")
    if num_layers > len(file.tensors):
        raise file.error(f"{arch}.block_count", f"{num_layers} layers, but the file has {len(file.tensors)} tensors")
    hidden_size = file.positive(f"{arch}.embedding_length")
    num_heads = file.positive(f"{arch}.attention.head_count")
    head_dim = file.positive(f"{arch}.attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise file.error(f"{arch}.{key}", f"must equal the head size {head_dim}")
    config: dict[str, Any] = {
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": file.positive(f"{arch}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.positive(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.positive(f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{arch}.rope.freq_base", 1_000_000.0 if arch == "gemma3" else 10_000.0),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": dtype,
        **_token_ids(file),
    }
    scaling = _rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | _family(file, config)


def _family(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    arch = file.architecture
    if arch == "gemma3":
        return _gemma3(file, config)
    family: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch] + "ForCausalLM"],
        "model_type": arch,
        "hidden_act": "silu",
    }
    if arch != "qwen2":  # Qwen2 always has them
        family["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return family


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    is_27b = num_layers == _GEMMA3_27B_LAYERS
    key = "gemma3.attention.sliding_window_pattern"  # a period, or one flag per layer
    flags = file.get(key)
    if isinstance(flags, list):
        sliding = [bool(flag) for flag in flags]
    else:
        period = file.positive(key, _GEMMA3_PERIOD)
        sliding = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(sliding) != num_layers:
        raise file.error(key, f"{len(sliding)} entries for {num_layers} layers")
    softcap = "gemma3.final_logit_softcapping"
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        ),
        "sliding_window": file.positive("gemma3.attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding],
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": None if file.get(softcap) is None else file.number(softcap),
        "attn_logit_softcapping": None,
    }


def _rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    arch = file.architecture
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    kind = file.string(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = file.number(f"{arch}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.integer(f"{arch}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise file.error(f"{arch}.rope.scaling.type", f"{kind!r} is not supported")


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's rope scaling. GGUF stores one divisor per frequency; the parameters found must give them back."""
    divisors = np.asarray(file.tensors["rope_freqs.weight"].data, dtype=np.float64).reshape(-1)
    original = file.integer(f"{file.architecture}.rope.scaling.original_context_length", 8192)
    factor, low, high = round(float(divisors.max()), 4), 1.0, 4.0
    head_dim = config["head_dim"]
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise file.error("rope_freqs.weight", "these frequencies are not Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _token_ids(file: GgufFile) -> dict[str, int | None]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: file.token_id(key) for name, key in names.items()}


def hf_generation_config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """generation_config.json: every token that ends a text or a turn is an end-of-sequence token."""
    ids = _token_ids(file)
    ends = [ids["eos_token_id"], file.token_id("eot_token_id"), file.token_id("eom_token_id")]
    ends += [tokens.index(token) for token in _END_OF_TURN_TOKENS if token in tokens]
    distinct = [end for end in dict.fromkeys(ends) if end is not None]
    return {**ids, "eos_token_id": distinct[0] if len(distinct) == 1 else distinct, "do_sample": False}
