"""Loads the served model: pagewire's own family or Hugging Face's module, with the adapters that may change it."""

from dataclasses import dataclass

from engine.errors import ModelError
from engine.kernel_set import ModelKernels
from engine.lora.build import build_adapters, build_slots
from engine.lora.slots import AdapterSlots
from engine.lora.store import AdapterStore
from engine.memory import KV_FORMATS
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder, Model
from engine.models.registry import load_model
from engine.parallel.config import shard_config
from engine.transformers_config import ServedConfig, TransformersConfig, load_config
from engine.weights_digest import Progress, weights_digest
from pagewire.config import EngineOptions
from pagewire.speculative import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`digest` is the weights'; `adapters` and `slots` are None if adapters are not served."""

    config: ServedConfig
    model: Model
    digest: bytes
    adapters: AdapterStore | None = None
    slots: AdapterSlots | None = None


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """`digest` is that of the whole model's weights; `slots` are None if adapters are not served."""

    model: Decoder
    digest: bytes
    slots: AdapterSlots | None = None


def load_served_model(options: EngineOptions, kernels: ModelKernels, progress: Progress | None) -> LoadedModel:
    """Raises ModelError for a model or an adapter that cannot be served."""
    config = load_config(
        options.model, dtype=options.dtype, max_model_len=options.max_model_len, model_impl=options.model_impl
    )
    if kernels.NAME == "triton":
        _check_triton(options, config)
    digest = weights_digest(config.path, progress=progress)
    if isinstance(config, TransformersConfig):
        from engine.models.transformers_load import load_transformers_model  # it imports all of transformers

        if options.enable_lora:
            raise ModelError(f"{config.path}: enable_lora is not supported with model_impl = transformers")
        return LoadedModel(config, load_transformers_model(config, kernels), digest)
    kept, size = options.packed_cache_bytes, options.tensor_parallel_size
    own = config if size == 1 else shard_config(config, 0, size)
    model = load_model(own, kernels, progress=progress, digest=digest, packed_cache_bytes=kept)
    adapters, slots = build_adapters(options, config, model) if options.enable_lora else (None, None)
    return LoadedModel(config, model, digest, adapters, slots)


def load_part(options: EngineOptions, kernels: ModelKernels, rank: int) -> LoadedPart:
    """The part of the model that another rank than the first has. Raises ModelError."""
    config = load_config(
        options.model, dtype=options.dtype, max_model_len=options.max_model_len, model_impl=options.model_impl
    )
    if isinstance(config, TransformersConfig):
        raise ModelError(f"{config.path}: model_impl = transformers has no parts")
    digest = weights_digest(config.path)
    own = shard_config(config, rank, options.tensor_parallel_size)
    model = load_model(own, kernels, digest=digest, packed_cache_bytes=options.packed_cache_bytes)
    return LoadedPart(model, digest, build_slots(options, model) if options.enable_lora else None)


def _check_triton(options: EngineOptions, config: ModelConfig | TransformersConfig) -> None:
    """Raises ModelError for what the triton kernels have no part of yet."""
    speculative = None if options.speculative_config is None else SpeculativeConfig.parse(options.speculative_config)
    refused = {
        "enable_lora": options.enable_lora,
        f"kv_cache_dtype = {options.kv_cache_dtype}": KV_FORMATS[options.kv_cache_dtype] == "int8",
        "model_impl = transformers": isinstance(config, TransformersConfig),
        "latent attention": config.is_latent,
        "speculative_config.model": speculative is not None and speculative.model is not None,
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise ModelError(f"{config.path}: {what} is not supported with kernels = triton yet")
