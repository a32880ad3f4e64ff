"""Mixtral and Qwen3-MoE: Llama's blocks with experts for an MLP, in all layers or some."""

from engine.kernel_set import ModelKernels
from engine.model_config import ModelConfig
from engine.models import llama
from engine.models.decoder import Decoder
from engine.weight_source import WeightSource


def build(config: ModelConfig, kernels: ModelKernels, weights: WeightSource) -> Decoder:
    """The model; `config.moe` says which layers have experts, `config.qk_norm` is set for Qwen3-MoE."""
    return llama.build(config, kernels, weights)
