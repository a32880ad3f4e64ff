"""DeepSeek-V2 and V3 (and what is shaped so): Llama's blocks with latent attention, experts beside shared ones."""

from engine.kernel_set import ModelKernels
from engine.model_config import ModelConfig
from engine.models import llama
from engine.models.decoder import Decoder
from engine.weight_source import WeightSource


def build(config: ModelConfig, kernels: ModelKernels, weights: WeightSource) -> Decoder:
    """The model; `config.mla` and `config.moe` say what its layers are made of."""
    return llama.build(config, kernels, weights)
