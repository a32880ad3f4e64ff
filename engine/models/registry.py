"""From a model directory to a model that runs: the family's builder, its weights, its kernels."""

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.cache_dir import default_cache_dir
from engine.errors import ModelError
from engine.kernel_set import ModelKernels
from engine.model_config import ModelConfig
from engine.models import deepseek, gemma3, llama, mixtral, phi3, qwen2, qwen3
from engine.models.decoder import Decoder
from engine.packed_weights import build_packed, build_private
from engine.weight_source import DirectSource, NotedSource, WeightSource
from engine.weights import map_weights, open_weights
from engine.weights_digest import Progress
from kernels.cpu.native import NativeKernels

FAMILIES: Mapping[str, Callable[[ModelConfig, ModelKernels, WeightSource], Decoder]] = {
    "llama": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "gemma3": gemma3.build,
    "mixtral": mixtral.build,
    "qwen3_moe": mixtral.build,
    "phi3": phi3.build,
    "deepseek_v2": deepseek.build,
    "deepseek_v3": deepseek.build,
}


def load_model(
    config: ModelConfig,
    kernels: ModelKernels,
    *,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    digest: bytes | None = None,
    packed_cache_bytes: int | None = None,
) -> Decoder:
    """Build the model that `config` describes from the weights beside its config.json. Raises ModelError.

    With their `digest`, weights that the kernels want packed are kept in a file that processes share; such files take
    at most `packed_cache_bytes`.
    """

    def build(source: WeightSource) -> Decoder:
        noted = NotedSource(source)
        try:
            model = FAMILIES[config.family](config, kernels, noted)
        except ModelError:
            raise
        except ValueError as error:
            quantization = kernels.quantization or config.quantization_label
            if quantization is None:
                raise
            raise ModelError(f"{config.path}: quantization = {quantization}: {error}") from error
        model.packed_bytes = noted.packed_bytes
        return model

    if config.quantization is not None and kernels.quantization is not None:
        raise ModelError(
            f"{config.path}: quantization = {kernels.quantization}: the checkpoint is quantized already "
            f"({config.quantization_label})"
        )
    if isinstance(kernels, NativeKernels):
        if digest is None:
            return build_private(config, kernels, build)
        directory = cache_dir or default_cache_dir()
        return build_packed(
            config,
            kernels,
            build,
            digest=digest,
            cache_dir=directory,
            max_cache_bytes=packed_cache_bytes,
            progress=progress,
        )
    if config.quantization is None:
        weights = open_weights(config.path, config.dtype, progress=progress, cache_dir=cache_dir, shard=config.shard)
    else:
        weights = map_weights(config.path, config.dtype, config.quantization, config.shard)
    model = build(DirectSource(kernels, weights))
    weights.finish(config.unserved_layers)
    return model
