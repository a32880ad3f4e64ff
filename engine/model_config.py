"""What a model is made of: one frozen description for all families, made of a Hugging Face configuration."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine.errors import ModelError
from engine.hf_config import check_head_dim, compute_dtype, first_id, positive, read_eos_token_ids, read_hf_config
from engine.kept_config import kept_config
from engine.longrope import read_phi_rope
from engine.mla_config import MLA_FAMILIES, MlaConfig
from engine.moe_config import MoeConfig
from engine.parallel.shard import Shard
from engine.quantized.config import parse_quantization
from engine.quantized.stored import StoredFormat
from engine.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Served architecture -> family. A multimodal one is served as its text model."""
_WITH_EXPERTS = ("mixtral", "qwen3_moe", *MLA_FAMILIES)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `layer_windows` and `layer_ropes` have an entry per layer; a window of None sees all.

    `attention_scale` multiplies q·k; the caps are `cap * tanh(x / cap)`; `norm_unit_offset` means weights are 1 + w.
    """

    path: Path
    architecture: str
    family: str
    dtype: torch.dtype
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    norm_unit_offset: bool
    activation: Activation
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    attention_cap: float | None
    final_cap: float | None
    embedding_scale: float | None
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[RopeConfig, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    """Latent attention: there is one kv head then, of a cell's size; its values are the first numbers of its keys."""
    unserved_layers: range = range(0)
    """Layers of the checkpoint behind the model's own."""
    quantization: StoredFormat | None = None
    """How the checkpoint stores its quantized matrices; None: it has none."""
    shard: Shard | None = None
    """Set in the config of one rank's part of the model, whose heads and sizes are then the rank's own."""

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rope_dim(self) -> int:
        """Of a head, or of the part that has a rotation of its own."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def is_latent(self) -> bool:
        """Whether the cache has latents instead of keys and values."""
        return self.mla is not None

    @property
    def fused_projections(self) -> bool:
        """Whether q, k and v are stored in one tensor, gate and up in another."""
        return self.family == "phi3"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def quantization_label(self) -> str | None:
        """Names what the checkpoint has quantized, and how."""
        return None if self.quantization is None else self.quantization.label

    def kv_config(self) -> dict[str, object]:
        """What, beside weights, dtype and quantization, changes KV values, as JSON types (the root of the keys, §5)."""
        unrelated = {"path", "dtype", "vocab_size", "max_position", "final_cap", "tie_word_embeddings"}
        unrelated |= {"eos_token_ids", "bos_token_id", "architecture", "moe", "quantization", "shard"}
        unrelated |= {"mla", "unserved_layers"}
        config: dict[str, object] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in unrelated
        }
        config["layer_windows"] = list(self.layer_windows)
        config["layer_ropes"] = [rope.identity for rope in self.layer_ropes]
        if self.moe is not None:
            config["moe"] = self.moe.kv_config()
        if self.mla is not None:
            config["mla"] = self.mla.kv_config()
        return config


def load_model_config(path: Path | str, *, dtype: str = "auto", max_model_len: int | None = None) -> ModelConfig:
    """Read `path`/config.json (and generation_config.json). Raises ModelError.

    `dtype` "auto" keeps the stored one; float16, in which nothing computes here, becomes float32. Phi's rotary
    embedding depends on the longest sequence to be served (`max_model_len`; None: the model's own limit).
    """
    directory = Path(path)
    hf = kept_config(directory / "config.json", lambda: read_hf_config(directory))
    name = str((getattr(hf, "architectures", None) or [""])[0])
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{directory / 'config.json'}: architecture {name!r} (model_type {hf.model_type!r}) is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    text = getattr(hf, "text_config", None) or hf
    if text is not hf:
        text.tie_word_embeddings = hf.tie_word_embeddings
    try:
        return _describe(directory, name, hf, text, compute_dtype(dtype, text), max_model_len)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{directory / 'config.json'}: {error}") from error


def _describe(
    directory: Path, architecture: str, hf: Any, text: Any, dtype: torch.dtype, max_model_len: int | None
) -> ModelConfig:
    family = ARCHITECTURES[architecture]
    gemma = family == "gemma3"
    num_heads = positive(text, "num_attention_heads")
    hidden_size = positive(text, "hidden_size")
    head_dim = getattr(text, "head_dim", None) or hidden_size // num_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(f"{num_heads} heads over {num_kv_heads} kv heads of size {head_dim} can't be laid out")
    check_head_dim(head_dim)
    mla = MlaConfig.read(text, family) if family in MLA_FAMILIES else None
    scale = float(text.query_pre_attn_scalar if gemma else head_dim) ** -0.5
    if mla is not None:
        num_kv_heads, head_dim, scale = 1, mla.cell_dim, mla.attention_scale(text.rope_parameters)
    activation = str(text.hidden_activation if gemma else text.hidden_act)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    if getattr(text, "use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention is not supported; attention here is causal")
    attention_bias = bool(getattr(text, "attention_bias", False))
    num_layers = positive(text, "num_hidden_layers")
    max_position = positive(text, "max_position_embeddings")
    if family == "phi3":
        longest = max_position if max_model_len is None else max_model_len
        rope = read_phi_rope(text.rope_parameters, head_dim=head_dim, max_position=max_position, longest=longest)
        ropes: tuple[RopeConfig, ...] = (rope,) * num_layers
    else:
        ropes = _layer_ropes(text, num_layers)
    return ModelConfig(
        path=directory,
        architecture=architecture,
        family=family,
        dtype=dtype,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=positive(text, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=positive(text, "vocab_size"),
        max_position=max_position,
        norm_eps=float(text.rms_norm_eps),
        norm_unit_offset=gemma,
        activation=_ACTIVATIONS[activation],
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(getattr(text, "mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        attention_scale=scale,
        attention_cap=getattr(text, "attn_logit_softcapping", None),
        final_cap=getattr(text, "final_logit_softcapping", None),
        embedding_scale=hidden_size**0.5 if gemma else None,
        tie_word_embeddings=bool(text.tie_word_embeddings),
        layer_windows=_layer_windows(text, num_layers),
        layer_ropes=ropes,
        eos_token_ids=read_eos_token_ids(directory, hf, text),
        bos_token_id=first_id(text.bos_token_id),
        moe=MoeConfig.read(text, family, num_layers) if family in _WITH_EXPERTS else None,
        mla=mla,
        unserved_layers=range(num_layers, num_layers + (getattr(text, "num_nextn_predict_layers", None) or 0)),
        quantization=_quantization(hf),
    )


def _quantization(hf: Any) -> StoredFormat | None:
    """AutoConfig keeps the field as the file has it."""
    stored = getattr(hf, "quantization_config", None)
    return None if stored is None else parse_quantization(stored)


def _layer_kinds(text: Any, num_layers: int) -> list[str]:
    """One of "full_attention", "sliding_attention" per layer."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # Llama and Mistral say it for all layers at once
        return ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types has {kind!r}; supported are full_attention, sliding_attention")
    return list(kinds)


def _layer_windows(text: Any, num_layers: int) -> tuple[int | None, ...]:
    kinds = _layer_kinds(text, num_layers)
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = positive(text, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_ropes(text: Any, num_layers: int) -> tuple[RopeConfig, ...]:
    """transformers keeps one set of rope parameters, or one per layer kind (Gemma 3)."""
    parameters = text.rope_parameters
    kinds = _layer_kinds(text, num_layers)
    per_kind = {
        kind: RopeConfig.read(parameters[kind] if isinstance(parameters.get(kind), dict) else parameters)
        for kind in sorted(set(kinds))
    }
    return tuple(per_kind[kind] for kind in kinds)
