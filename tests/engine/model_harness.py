"""Runs a model without the engine: prompts in chunks, paged KV in shuffled blocks, greedy decoding, and the oracle."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.kernel_set import load_kernel_set
from engine.memory import KvLayout, KvMemory
from engine.models.registry import load_model
from engine.models.transformers_load import load_transformers_model
from engine.transformers_config import ModelImpl, TransformersConfig, load_config
from kernels import cpu
from kernels.paged import PagedBatch
from tests.tiny_models import VOCAB_SIZE

KERNELS = ("reference", "torch", "native")
"""All kernel sets; `TinyModel` skips the test where the native one can't run."""

transformers_logging.disable_progress_bar()
logging.getLogger("transformers").setLevel(logging.ERROR)


def hugging_face(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The oracle: transformers' own model on the same weights."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def hugging_face_logits(model: Any, token_ids: Tensor) -> Tensor:
    return model(token_ids[None]).logits[0].float()


def random_prompt(length: int, seed: int) -> Tensor:
    """Token ids, no special ones."""
    return torch.randint(5, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


@dataclass
class Place:
    """One sequence in the model's memory."""

    block_table: list[int]
    num_computed_tokens: int = 0


class TinyModel:
    """A model with KV memory for a few sequences of up to `max_tokens` tokens, each in blocks of its own, shuffled."""

    def __init__(
        self,
        path: Path,
        *,
        kernels: str = "torch",
        dtype: str = "auto",
        block_size: int = 4,
        num_sequences: int = 4,
        max_tokens: int = 160,
        threads: int = 1,
        max_model_len: int | None = None,
        model_impl: ModelImpl = "auto",
    ) -> None:
        if kernels == "native" and not cpu.available():
            pytest.skip(cpu.why_unavailable())
        self.config: Any
        self.model: Any
        self.config = load_config(path, dtype=dtype, max_model_len=max_model_len, model_impl=model_impl)
        load = load_transformers_model if isinstance(self.config, TransformersConfig) else load_model
        self.model = load(self.config, load_kernel_set(kernels, threads))
        per_sequence = -(-max_tokens // block_size)
        config = self.config
        layout = KvLayout.of(config, block_size)
        self.memory = KvMemory(layout, per_sequence * num_sequences)
        order = torch.randperm(self.memory.num_blocks, generator=torch.Generator().manual_seed(block_size)).tolist()
        self._free = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(num_sequences)]

    def place(self) -> Place:
        return Place(self._free.pop())

    def step(self, *work: tuple[Place, Tensor]) -> list[Tensor]:
        """Compute the next tokens of each sequence in one batch; the logits of all of them."""
        starts = [place.num_computed_tokens for place, _ in work]
        query_lens = [len(tokens) for _, tokens in work]
        kv_lens = [start + length for start, length in zip(starts, query_lens, strict=True)]
        tables = [place.block_table for place, _ in work]
        batch = PagedBatch.build(query_lens, kv_lens, tables, self.memory.layout.block_size)
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, kv_lens, strict=True)])
        hidden = self.model.forward(torch.cat([tokens for _, tokens in work]), positions, batch, self.memory)
        for (place, _), end in zip(work, kv_lens, strict=True):
            place.num_computed_tokens = end
        return list(self.model.logits(hidden).split(query_lens))

    def logits(self, token_ids: Tensor, chunk: int | None = None) -> Tensor:
        """The logits of every position, computed in chunks."""
        place = self.place()
        return torch.cat([self.step((place, part))[0] for part in token_ids.split(chunk or len(token_ids))])

    def greedy(self, prompt: Tensor, num_tokens: int, chunk: int) -> list[int]:
        """Continue the prompt token by token with the likeliest one, as long as none ends the text."""
        place, output, pending = self.place(), [], prompt
        while True:
            for part in pending.split(chunk):
                last = self.step((place, part))[0][-1]
            output.append(int(last.argmax()))
            if len(output) == num_tokens or output[-1] in self.config.eos_token_ids:
                return output
            pending = torch.tensor([output[-1]])
