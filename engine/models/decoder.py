"""The frame all families share: embed, run the blocks, norm, project onto the vocabulary."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernel_set import ModelKernels, numerics_class
from engine.layers import RmsNorm, StepContext
from engine.lora.step import LoraStep
from engine.memory import KvLayers, KvMemory
from engine.model_config import ModelConfig
from engine.parallel.group import RankGroup
from engine.parallel.vocabulary import embed
from engine.weight_source import Projection, WeightSource
from kernels.lora import Lora
from kernels.paged import StepBatch

EMBEDDING, HEAD = ("embed_tokens",), ("lm_head",)
"""Names of the projections that are no layer's; a tied model has a head of its own as far as adapters go."""


class Block(Protocol):
    """One layer: (hidden states [T, hidden], step) -> hidden states."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor: ...


class Model(Protocol):
    """What runs a batch: one of the families below, or a module of transformers.

    `batch` is what its kernels take of a step (`kernels.paged.StepBatch`), see `ModelRunner`.
    """

    @property
    def kernels(self) -> ModelKernels: ...
    @property
    def numerics_class(self) -> str: ...
    @property
    def num_bytes_read(self) -> int: ...
    @property
    def adaptable(self) -> tuple[Projection, ...]: ...
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: Any,
        memory: KvMemory,
        adapters: LoraStep | None = None,
    ) -> Tensor: ...
    def logits(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor: ...


class Decoder:
    """A model of one family, on one kernel set. Families differ in their blocks alone."""

    def __init__(
        self, config: ModelConfig, kernels: ModelKernels, weights: WeightSource, blocks: Sequence[Block]
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.blocks = tuple(blocks)
        self.group: RankGroup | None = None
        """The ranks of which this is one, set before the first batch; None: the model is not shared out."""
        self.packed_bytes: Mapping[Projection, int] = {}
        """Everything that was packed for it, with its size; set by whoever built it."""
        rows, columns = (config.vocab_size,), config.hidden_size
        self.embedding = weights.pack(Projection(EMBEDDING, rows, columns))
        self.norm = RmsNorm(kernels, weights, "norm", config.hidden_size, config)
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else weights.pack(Projection(HEAD, rows, columns))

    @property
    def numerics_class(self) -> str:
        """Within one class logits are bitwise equal on every path."""
        config = self.config
        num_ranks = 1 if config.shard is None else config.shard.size
        return numerics_class(self.kernels, config.dtype, stored=config.quantization_label, num_ranks=num_ranks)

    @property
    def num_bytes_read(self) -> int:
        """Bytes of packed weights that a forward of one token reads; of the experts' the share that it goes through."""
        config = self.config
        of_experts = 1.0 if config.moe is None else config.moe.top_k / config.moe.num_experts
        return int(
            sum(
                size * (of_experts if projection.routed else 1.0)
                for projection, size in self.packed_bytes.items()
                if projection.names != EMBEDDING or config.tie_word_embeddings
            )
        )

    @property
    def adaptable(self) -> tuple[Projection, ...]:
        """What adapters may change: all but experts and what is absorbed; the head also where it is the embedding."""
        projections = tuple(each for each in self.packed_bytes if each.adaptable)
        if any(each.names == HEAD for each in projections):
            return projections
        return (*projections, Projection(HEAD, (self.config.vocab_size,), self.config.hidden_size))

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: StepBatch,
        memory: KvLayers,
        adapters: LoraStep | None = None,
    ) -> Tensor:
        """Compute the batch's tokens and store their keys and values. input_ids, positions [T] -> [T, hidden]."""
        return self.run(input_ids, self.begin(positions, batch, memory, adapters))

    def begin(
        self, positions: Tensor, batch: StepBatch, memory: KvLayers, adapters: LoraStep | None = None
    ) -> StepContext:
        """What `run` needs of a step besides its tokens. positions [T]."""
        return StepContext.build(self.config, self.kernels, batch, positions, memory, adapters, self.group)

    def run(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """The embedding and all layers. input_ids [T] -> [T, hidden]."""
        config, group = self.config, self.group
        lora = step.lora(EMBEDDING)
        if group is None or config.shard is None:
            x = self.kernels.embedding(input_ids, self.embedding, config.embedding_scale, lora=lora)
        else:
            token_ids = config.shard.vocabulary
            x = embed(self.kernels, self.embedding, input_ids, token_ids, config.embedding_scale, group, lora)
        for block in self.blocks:
            x = block(x, step)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor:
        """float32 logits of rows of `forward`'s result; `adapters` are those rows'. [R, hidden] -> [R, vocab].

        Of a rank: those of its own part of the vocabulary.
        """
        lora = self._head_lora(adapters)
        logits = self.kernels.logits(self.norm(hidden), self.head, lora=lora)
        return logits if self.config.final_cap is None else self.kernels.soft_cap(logits, self.config.final_cap)

    @torch.inference_mode()
    def head_input(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor | None:
        """Rows [R, hidden] whose product with `head` is the logits; None where more happens to them."""
        if self.config.final_cap is not None or self._head_lora(adapters) is not None:
            return None
        return self.norm(hidden)

    @staticmethod
    def _head_lora(adapters: LoraStep | None) -> Lora | None:
        return None if adapters is None else adapters.of(HEAD)
