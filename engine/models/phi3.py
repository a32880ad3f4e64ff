"""Phi-3, Phi-3.5 and Phi-4 (dense, text): Llama's blocks; q, k, v and gate, up stored fused, heads rotated in part."""

from engine.kernel_set import ModelKernels
from engine.model_config import ModelConfig
from engine.models import llama
from engine.models.decoder import Decoder
from engine.weight_source import WeightSource


def build(config: ModelConfig, kernels: ModelKernels, weights: WeightSource) -> Decoder:
    """The model; `config.fused_projections` is set for this family."""
    return llama.build(config, kernels, weights)
