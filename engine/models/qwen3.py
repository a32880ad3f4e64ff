"""Qwen3 (dense): Llama's blocks with an RMSNorm on each head of q and k before the rotation."""

from engine.kernel_set import ModelKernels
from engine.model_config import ModelConfig
from engine.models import llama
from engine.models.decoder import Decoder
from engine.weight_source import WeightSource


def build(config: ModelConfig, kernels: ModelKernels, weights: WeightSource) -> Decoder:
    """The model; `config.qk_norm` is set for this family."""
    return llama.build(config, kernels, weights)
