"""Qwen2 and Qwen2.5: Llama's blocks with biases on q, k and v, and sliding windows in the upper layers if enabled."""

from engine.kernel_set import ModelKernels
from engine.model_config import ModelConfig
from engine.models import llama
from engine.models.decoder import Decoder
from engine.weight_source import WeightSource


def build(config: ModelConfig, kernels: ModelKernels, weights: WeightSource) -> Decoder:
    """The model; `config.qkv_bias` is set for this family."""
    return llama.build(config, kernels, weights)
