"""Tiny random-weight models of every family, written in the Hugging Face layout, with a byte-level tokenizer.

The weights are scaled so that greedy text varies and the best token usually wins by a clear margin; norms, biases and
the `1 + w` norms of Gemma are random too, so that a wrong convention shows.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
MERGES = (
    "t h", "th e", "Ġ the", "i n", "e r", "a n", "o n", "r e", "Ġ a", "o r", "e n", "Ġ s", "Ġ w", "a t", "Ġ c",
    "o u", "i s", "Ġ o", "e s", "an d", "in g", "Ġ f", "Ġ b", "Ġ p", "Ġ in", "e d", "Ġ m", "a l", "Ġ l", "Ġo f",
    "l l", "Ġ t", "Ġt o", "Ġ d", "Ġ h", "o m", "i t", "a s", "l e",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<start_of_turn>tools\n"
    "{{ tools | map(attribute='function.name') | join(' ') }}<end_of_turn>\n{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] | trim }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
VOCAB_SIZE = 300
"""5 specials + 256 bytes + 39 merges."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "sliding_window": 11,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "head_dim": 32,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 19,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "original_max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "gpt2": {  # not one of pagewire's own
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "head_dim": 32,
        "attention_bias": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {  # as V2-Lite: no latent of the queries, softmax, the best experts of all
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def make_tiny_model(
    family: str, directory: Path, *, seed: int = 0, dtype: str = "float32", **config_overrides: Any
) -> Path:
    """Write a model of `family`, one of those above, into `directory` and return it."""
    config = {**_COMMON, **_FAMILIES[family], "dtype": dtype, **config_overrides}
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    eos, pad, bos = config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]
    _write_json(directory / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})
    weights = tiny_weights(config, seed=seed)
    save_file(
        {
            name: tensor if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, dtype))
            for name, tensor in weights.items()
        },
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(directory)
    return directory


def tiny_weights(config: dict[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights under Hugging Face's names for a config as written by `make_tiny_model`."""
    generator = torch.Generator().manual_seed(seed)
    if config["model_type"] == "gpt2":
        return _gpt2_weights(config, generator)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    gemma = config["model_type"] == "gemma3_text"
    tied = config["tie_word_embeddings"]
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, std: float | None = None) -> None:
        weights[name] = torch.randn(rows, columns, generator=generator) * (columns**-0.5 if std is None else std)

    def gated_mlp(names: tuple[str, str, str], size: int) -> None:
        gate, up, down = names
        matrix(f"{gate}.weight", size, hidden)
        matrix(f"{up}.weight", size, hidden)
        matrix(f"{down}.weight", hidden, size, 1.5 * size**-0.5)

    def norm(name: str, size: int, mean: float = 1.0) -> None:
        weights[name] = torch.randn(size, generator=generator) * 0.2 + (mean - 1.0 if gemma else mean)

    # Tied models repeat their last token for ever unless the layers outweigh the (small) embedding in the residual
    # stream; the last norm then brings the logits back to a standard deviation of about 3.
    small = 0.04 if gemma else 0.1
    matrix("model.embed_tokens.weight", vocab, hidden, small if tied else 1.0)

    def latent_attention(prefix: str) -> None:
        """As V2 and V3 name it; norms far from 1, so that one that is left out shows."""
        rank, latent, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
        if rank is None:
            matrix(f"{prefix}q_proj.weight", heads * (keys + rope), hidden, 1.5 / 8)
        else:
            matrix(f"{prefix}q_a_proj.weight", rank, hidden)
            norm(f"{prefix}q_a_layernorm.weight", rank, mean=1.2)
            matrix(f"{prefix}q_b_proj.weight", heads * (keys + rope), rank, 1.5 * rank**-0.5)
        matrix(f"{prefix}kv_a_proj_with_mqa.weight", latent + rope, hidden)
        norm(f"{prefix}kv_a_layernorm.weight", latent, mean=1.2)
        matrix(f"{prefix}kv_b_proj.weight", heads * (keys + values), latent)
        matrix(f"{prefix}o_proj.weight", hidden, heads * values, 1.5 * (heads * values) ** -0.5)
        if config.get("attention_bias"):
            names = {"kv_a_proj_with_mqa": latent + rope, "o_proj": hidden} | ({"q_a_proj": rank} if rank else {})
            for name, size in names.items():
                weights[f"{prefix}{name}.bias"] = torch.randn(size, generator=generator) * 0.5

    def deepseek_experts(prefix: str) -> None:
        size, count = config["moe_intermediate_size"], config["n_routed_experts"]
        matrix(f"{prefix}gate.weight", count, hidden, 2 * hidden**-0.5)
        if config["model_type"] == "deepseek_v3":
            weights[f"{prefix}gate.e_score_correction_bias"] = torch.randn(count, generator=generator) * 0.1
        for name, ffn_size in (
            *((f"{prefix}experts.{expert}", size) for expert in range(count)),
            (f"{prefix}shared_experts", size * config["n_shared_experts"]),
        ):
            gated_mlp((f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"), ffn_size)

    deepseek = config["model_type"].startswith("deepseek")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if deepseek:
            latent_attention(f"{prefix}self_attn.")
        for part, rows in () if deepseek else (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            # Sharp attention (logits of std ~2) makes the text depend on the history, not on the last token alone.
            matrix(f"{prefix}self_attn.{part}_proj.weight", rows * head_dim, hidden, (1.0 if part == "v" else 1.5) / 8)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                weights[f"{prefix}self_attn.{part}_proj.bias"] = torch.randn(rows * head_dim, generator=generator) * 0.5
        if not deepseek:
            matrix(f"{prefix}self_attn.o_proj.weight", hidden, heads * head_dim, 1.5 * (heads * head_dim) ** -0.5)
        if config.get("attention_bias") and not deepseek:
            weights[f"{prefix}self_attn.o_proj.bias"] = torch.randn(hidden, generator=generator) * 0.5
        if gemma or config["model_type"] in ("qwen3", "qwen3_moe"):
            norm(f"{prefix}self_attn.q_norm.weight", head_dim)
            norm(f"{prefix}self_attn.k_norm.weight", head_dim)
        if config["model_type"] == "mixtral":
            matrix(f"{prefix}block_sparse_moe.gate.weight", config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                name = f"{prefix}block_sparse_moe.experts.{expert}"
                gated_mlp((f"{name}.w1", f"{name}.w3", f"{name}.w2"), ffn)
        elif deepseek and layer >= config["first_k_dense_replace"]:
            deepseek_experts(f"{prefix}mlp.")
        elif config["model_type"] == "qwen3_moe" and is_sparse(config, layer):
            matrix(f"{prefix}mlp.gate.weight", config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                name = f"{prefix}mlp.experts.{expert}"
                names = (f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj")
                gated_mlp(names, config["moe_intermediate_size"])
        else:
            name = f"{prefix}mlp"
            gated_mlp((f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"), ffn)
        norm(f"{prefix}input_layernorm.weight", hidden)
        norm(f"{prefix}post_attention_layernorm.weight", hidden)
        if gemma:
            norm(f"{prefix}pre_feedforward_layernorm.weight", hidden)
            norm(f"{prefix}post_feedforward_layernorm.weight", hidden)
    norm("model.norm.weight", hidden, mean=3 / (small * hidden**0.5) if tied else 1.0)
    if not tied:
        matrix("lm_head.weight", vocab, hidden, 3 * hidden**-0.5)
    return fused(weights) if config["model_type"] == "phi3" else weights


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With q, k, v and gate, up in one tensor each, as Phi-3 stores them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        for one, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if (part := name.split(".")[-2] if name.count(".") > 1 else "") in parts:
                name = name.replace(part, one)
                tensor = torch.cat((found[name], tensor)) if name in found else tensor
        found[name] = tensor
    return found


def _gpt2_weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, weights = config["hidden_size"], {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * std + mean

    def norm(name: str, mean: float = 1.0) -> None:
        normal(f"{name}.weight", hidden, std=0.2, mean=mean)
        normal(f"{name}.bias", hidden, std=0.1)

    normal("transformer.wte.weight", config["vocab_size"], hidden, std=0.1)
    normal("transformer.wpe.weight", config["max_position_embeddings"], hidden, std=0.1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"transformer.h.{layer}"
        for name, rows, columns, std in (
            ("attn.c_attn", hidden, 3 * hidden, 1.5 / 8),
            ("attn.c_proj", hidden, hidden, 1.5 / 8),
            ("mlp.c_fc", hidden, 4 * hidden, 1 / 8),
            ("mlp.c_proj", 4 * hidden, hidden, 1.5 / 16),
        ):
            normal(f"{prefix}.{name}.weight", rows, columns, std=std)
            normal(f"{prefix}.{name}.bias", columns, std=0.1)
        norm(f"{prefix}.ln_1")
        norm(f"{prefix}.ln_2")
    norm("transformer.ln_f", mean=3 / (0.1 * hidden**0.5))
    return weights


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Whether that layer of a Qwen3-MoE has experts."""
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE: the specials, all 256 bytes, then the merges; any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(merge) for merge in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != VOCAB_SIZE:
        raise ValueError(f"the tiny vocabulary has {len(vocab)} distinct tokens, not {VOCAB_SIZE}")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with a chat template)."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _COMMON["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
