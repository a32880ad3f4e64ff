"""Prefill and decode of a random model in Llama-3-8B's shape, as the engine runs them but for its scheduler.

A decode step is batch, forward, logits, sampling and the tokens' copy to the host; its floor is the bytes of weights
and KV. What the engine has not got yet is listed as not measured.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.results import NOT_MEASURED, Result
from bench.gpu.timings import BYTES_PER_MS, FLOPS_PER_MS
from engine.device_sampler import DeviceSampler
from engine.kernel_set import ModelKernels, load_kernel_set
from engine.memory import KvLayout, KvMemory
from engine.model_config import ModelConfig, load_model_config
from engine.models import llama
from engine.models.decoder import Decoder
from engine.sample import SampleRow
from engine.weight_source import Projection
from kernels.paged import PagedBatch
from pagewire.sampling import SamplingParams

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
TINY = {**LLAMA_3_8B, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 150, "max_position_embeddings": 128}
STEPS = 20


class RandomSource:
    """Weights of any shape, small enough that nothing overflows."""

    def __init__(self, kernels: ModelKernels) -> None:
        self._kernels = kernels
        self.num_bytes = 0

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device=self._kernels.device)

    def pack(self, projection: Projection) -> Any:
        shapes = [(rows, projection.num_in) for rows in projection.num_outs]
        device = self._kernels.device
        matrices = [torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for shape in shapes]
        if projection.names != ("embed_tokens",):
            self.num_bytes += sum(matrix.nbytes for matrix in matrices)
        return self._kernels.pack(*matrices, gated=projection.gated)


def rows(device: torch.device) -> Iterator[Result]:
    is_dry = device.type == "cpu"
    kernels = load_kernel_set("triton", device=device.type)
    config = make_config(TINY if is_dry else LLAMA_3_8B)
    source = RandomSource(kernels)
    model = llama.build(config, kernels, source)
    batch, context, chunk, repeats = (2, 20, 32, 1) if is_dry else (64, 1024, 2048, 4)
    layout = KvLayout.of(config, 16)
    blocks_per_sequence = -(-max(context + STEPS, chunk) // 16)
    memory = KvMemory(layout, batch * blocks_per_sequence, "private", device)
    tables = torch.randperm(memory.num_blocks).view(batch, -1).tolist()

    flops = 2.0 * (source.num_bytes / 2) * chunk
    seconds = statistics.median(_prefill(model, memory, tables, chunk, device) for _ in range(repeats))
    yield _row(is_dry, "prefill", f"{chunk} tokens", seconds, flops / FLOPS_PER_MS, chunk)
    steps = 2 if is_dry else STEPS
    seconds = statistics.median(_decode(model, memory, tables, context, steps, device))
    num_bytes = source.num_bytes + batch * context * layout.block_bytes / 16
    yield _row(is_dry, "decode, eager", f"{batch} x {context}", seconds, num_bytes / BYTES_PER_MS, batch)
    yield Result("model", "decode, CUDA graph", f"{batch} x {context}", NOT_MEASURED, "the engine has none yet", "", "")
    yield Result(
        "model", "1P1D, two processes on one device", "", NOT_MEASURED, "KV stays in device memory yet", "", ""
    )


def make_config(shape: dict[str, Any]) -> ModelConfig:
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    fixed |= {"dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fixed | shape))
        return load_model_config(directory)


def _row(is_dry: bool, name: str, shape: str, seconds: float, floor_ms: float, tokens: int) -> Result:
    if is_dry:
        return Result("model", name, shape, NOT_MEASURED, "", "", "ran")
    value = f"{seconds * 1e3:.2f} ms, {tokens / seconds:.0f} tokens/s"
    return Result("model", name, shape, value, f"floor {floor_ms:.2f} ms", f"{floor_ms / seconds / 1e3:.0%}", "ok")


def _prefill(model: Decoder, memory: KvMemory, tables: list[list[int]], chunk: int, device: torch.device) -> float:
    begin = time.perf_counter()
    ids = torch.randint(5, model.config.vocab_size, (chunk,)).to(device)
    batch = PagedBatch.build([chunk], [chunk], tables[:1], 16)
    hidden = model.forward(ids, torch.arange(chunk, device=device), batch, memory)
    model.logits(hidden[-1:]).cpu()
    return time.perf_counter() - begin


def _decode(
    model: Decoder, memory: KvMemory, tables: list[list[int]], context: int, steps: int, device: torch.device
) -> list[float]:
    """Seconds of each step but the first, in which kernels are compiled."""
    sampler, count, took = DeviceSampler(model.config.vocab_size), len(tables), []
    ids = torch.full((count,), 5)
    for step in range(steps):
        begin = time.perf_counter()
        length = context + step + 1
        batch = PagedBatch.build([1] * count, [length] * count, tables, 16)
        positions = torch.full((count,), length - 1, device=device)
        logits = model.logits(model.forward(ids.to(device), positions, batch, memory))
        drawn = sampler.sample(logits, [SampleRow(row, SamplingParams(), row, 0, length) for row in range(count)])
        if any(token.error for token in drawn):
            raise RuntimeError(f"nothing was drawn: {drawn[0].error}")
        ids = torch.tensor([token.token_id for token in drawn])
        took.append(time.perf_counter() - begin)
    return took[1:]
