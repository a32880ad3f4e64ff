"""Llama, and what loads as it: Mistral (with its sliding window), SmolLM, TinyLlama."""

from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.layers import Attention, GatedMlp, RmsNorm, StepContext
from engine.mla import LatentAttention
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.moe import ExpertsMlp
from engine.weight_source import WeightSource


class LlamaBlock:
    """x += attention(norm(x)); x += mlp(norm(x)), latent attention and an MLP of experts where the config has them."""

    def __init__(self, config: ModelConfig, kernels: ModelKernels, weights: WeightSource, layer: int) -> None:
        prefix = f"layers.{layer}"
        self.input_norm = RmsNorm(kernels, weights, f"{prefix}.input_layernorm", config.hidden_size, config)
        name, mla, moe = f"{prefix}.self_attn", config.mla, config.moe
        self.attention = (
            Attention(kernels, weights, name, layer, config)
            if mla is None
            else LatentAttention(kernels, weights, name, layer, config, mla)
        )
        self.mlp_norm = RmsNorm(kernels, weights, f"{prefix}.post_attention_layernorm", config.hidden_size, config)
        self.mlp = (
            ExpertsMlp(kernels, weights, f"{prefix}.mlp", config, moe)
            if moe is not None and moe.layers[layer]
            else GatedMlp(kernels, weights, f"{prefix}.mlp", config)
        )

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x = self.attention(self.input_norm(x), step, residual=x)
        return self.mlp(self.mlp_norm(x), step, residual=x)


def build(config: ModelConfig, kernels: ModelKernels, weights: WeightSource) -> Decoder:
    """The model; also that of families whose differences the config tells (biases, QK-norm, windows)."""
    blocks = [LlamaBlock(config, kernels, weights, layer) for layer in range(config.num_layers)]
    return Decoder(config, kernels, weights, blocks)
