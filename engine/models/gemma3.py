"""Gemma 3, text: norms before and after attention and MLP, 1 + w norms, QK-norm, sliding and full layers by turns."""

from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.layers import Attention, GatedMlp, RmsNorm, StepContext
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.weight_source import WeightSource


class Gemma3Block:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, kernels: ModelKernels, weights: WeightSource, layer: int) -> None:
        prefix, size = f"layers.{layer}", config.hidden_size
        self._kernels = kernels
        self.input_norm = RmsNorm(kernels, weights, f"{prefix}.input_layernorm", size, config)
        self.attention = Attention(kernels, weights, f"{prefix}.self_attn", layer, config)
        self.attention_norm = RmsNorm(kernels, weights, f"{prefix}.post_attention_layernorm", size, config)
        self.mlp_norm = RmsNorm(kernels, weights, f"{prefix}.pre_feedforward_layernorm", size, config)
        self.mlp = GatedMlp(kernels, weights, f"{prefix}.mlp", config)
        self.output_norm = RmsNorm(kernels, weights, f"{prefix}.post_feedforward_layernorm", size, config)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        attended = self.attention_norm(self.attention(self.input_norm(x), step))
        normed, x = self.mlp_norm.add(attended, x)
        return self._kernels.add(x, self.output_norm(self.mlp(normed, step)))


def build(config: ModelConfig, kernels: ModelKernels, weights: WeightSource) -> Decoder:
    """The model."""
    blocks = [Gemma3Block(config, kernels, weights, layer) for layer in range(config.num_layers)]
    return Decoder(config, kernels, weights, blocks)
