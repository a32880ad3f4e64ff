"""What the engine must know of a model that Hugging Face's own module runs, and which implementation a model gets."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from engine.errors import ModelError
from engine.hf_config import (
    check_head_dim,
    compute_dtype,
    first_id,
    positive,
    read_eos_token_ids,
    read_hf_config,
    read_json,
)
from engine.memory import CachedConfig
from engine.model_config import ARCHITECTURES, ModelConfig, load_model_config
from kvstore.hashing import canonical_json

ModelImpl = Literal["auto", "pagewire", "transformers"]

_LAYER_KINDS = ("full_attention", "sliding_attention")
_UNRELATED = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")


class ServedConfig(CachedConfig, Protocol):
    """What the engine asks of any model's config."""

    @property
    def path(self) -> Path: ...
    @property
    def dtype_name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def layer_windows(self) -> tuple[int | None, ...]: ...
    @property
    def quantization_label(self) -> str | None: ...
    def kv_config(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """The shape of the KV cache and the vocabulary; `identity` is a digest of all that config.json says.

    `layer_windows` has an entry per layer; a window of None sees all.
    """

    path: Path
    architecture: str
    dtype: torch.dtype
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    identity: str
    is_latent: bool = False
    """Latent attention is refused."""
    quantization_label: None = None
    """Quantized checkpoints are not for this implementation."""

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def kv_config(self) -> dict[str, object]:
        """What changes KV values: who computes them, and the whole config."""
        return {"implementation": "transformers", "config": self.identity, "layer_windows": list(self.layer_windows)}


def load_config(
    path: Path | str, *, dtype: str = "auto", max_model_len: int | None = None, model_impl: ModelImpl = "auto"
) -> ModelConfig | TransformersConfig:
    """The config of the implementation that is to run the model. "auto": pagewire's own where it has one.

    Raises ModelError.
    """
    directory = Path(path)
    if model_impl == "auto" and (directory / "config.json").is_file():
        architectures = read_json(directory / "config.json").get("architectures") or [""]
        model_impl = "pagewire" if architectures[0] in ARCHITECTURES else "transformers"
    if model_impl == "transformers":
        return _load_transformers_config(directory, dtype, max_model_len)
    return load_model_config(path, dtype=dtype, max_model_len=max_model_len)


def _load_transformers_config(directory: Path, dtype: str, max_model_len: int | None) -> TransformersConfig:
    hf = read_hf_config(directory)
    try:
        return _describe(directory, hf, dtype, max_model_len)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{directory / 'config.json'}: model_impl = transformers: {error}") from error


def _describe(directory: Path, hf: Any, dtype: str, max_model_len: int | None) -> TransformersConfig:
    name = str((getattr(hf, "architectures", None) or [""])[0])
    if getattr(hf, "quantization_config", None) is not None:
        raise ValueError("quantization_config is set; this implementation serves no quantized checkpoints")
    _check_architecture(name, hf)
    num_layers, num_heads = positive(hf, "num_hidden_layers"), positive(hf, "num_attention_heads")
    hidden_size = positive(hf, "hidden_size")
    num_kv_heads = getattr(hf, "num_key_value_heads", None) or num_heads
    head_dim = getattr(hf, "head_dim", None) or hidden_size // num_heads
    if not isinstance(num_kv_heads, int) or not isinstance(head_dim, int) or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads over {num_kv_heads} kv heads of size {head_dim} can't be laid out")
    check_head_dim(head_dim)
    max_position = positive(hf, "max_position_embeddings")
    _check_rope(hf, max_position if max_model_len is None else max_model_len)
    everything = {key: value for key, value in hf.to_dict().items() if key not in _UNRELATED}
    return TransformersConfig(
        path=directory,
        architecture=name,
        dtype=compute_dtype(dtype, hf),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=positive(hf, "vocab_size"),
        max_position=max_position,
        layer_windows=_layer_windows(hf, num_layers),
        eos_token_ids=read_eos_token_ids(directory, hf, hf),
        bos_token_id=first_id(getattr(hf, "bos_token_id", None)),
        identity=hashlib.sha256(canonical_json(everything)).hexdigest(),
    )


def _check_architecture(name: str, hf: Any) -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if hf.is_encoder_decoder:
        raise ValueError(f"{name or hf.model_type!r} is an encoder-decoder; only decoders are served")
    if CAUSAL.get(hf.model_type) != name:
        raise ValueError(
            f"architecture {name!r} (model_type {hf.model_type!r}) is no causal language model of transformers"
        )
    cls = getattr(transformers, name)
    if not getattr(cls, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} does not attend through transformers' attention interface, which the paged cache needs"
        )
    if getattr(cls, "_is_stateful", False):
        raise ValueError(f"{name} keeps state beside keys and values (state space, linear attention)")
    for field in ("text_config", "vision_config", "audio_config"):
        if getattr(hf, field, None) is not None:
            raise ValueError(f"{field} is set; only text models are served")


def _check_rope(hf: Any, longest: int) -> None:
    """LongRoPE changes all keys when the longest sequence of a batch passes the original length."""
    parameters = getattr(hf, "rope_parameters", None) or {}
    each = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for values in each:
        original = values.get("original_max_position_embeddings")
        if values.get("rope_type") == "longrope" and not (isinstance(original, int) and longest <= original):
            raise ValueError(
                f"rope_type 'longrope' changes with the length beyond {original} tokens and max_model_len is "
                f"{longest}: cached keys would depend on what follows; lower max_model_len"
            )


def _layer_windows(hf: Any, num_layers: int) -> tuple[int | None, ...]:
    kinds, window = getattr(hf, "layer_types", None), getattr(hf, "sliding_window", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in _LAYER_KINDS:
            raise ValueError(f"layer_types has {kind!r}; supported are {', '.join(_LAYER_KINDS)}")
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    size = positive(hf, "sliding_window")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)
