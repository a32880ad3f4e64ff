"""Prefill and decode of a random model in Llama-3-8B's shape, as the engine runs them but for its scheduler.

A decode step fills the buffers, runs eager or as a CUDA graph, and copies the tokens to the host. "Waited for": the
next step begins when they are there. "Queued ahead": it goes on from them on the device and is queued before, which is
what asynchronous scheduling does. The floor is the bytes of weights and KV.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.results import NOT_MEASURED, Result
from bench.gpu.timings import BYTES_PER_MS, FLOPS_PER_MS
from engine.decode_graphs import CudaCapture, DecodeGraphs, DecodeSteps, EagerSteps, replayed_eagerly
from engine.decode_step import DecodeRow, DecodeStep
from engine.kernel_set import ModelKernels, load_kernel_set
from engine.memory import KvLayout, KvMemory
from engine.model_config import ModelConfig, load_model_config
from engine.models import llama
from engine.models.decoder import Decoder
from engine.sample import SampleRow
from engine.weight_source import Projection
from kernels.paged import PagedBatch
from kernels.staging import HostCopy
from kernels.triton.step_batch import place
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
    steps = 3 if is_dry else STEPS
    step = DecodeStep(model, memory, 16, max_rows=batch, max_model_len=blocks_per_sequence * 16)
    num_bytes = source.num_bytes + batch * context * layout.block_bytes / 16
    kinds: dict[str, DecodeSteps] = {"eager": EagerSteps(step)}
    began, free = time.perf_counter(), _free_bytes(device)
    kinds["CUDA graph"] = DecodeGraphs(step, replayed_eagerly if is_dry else CudaCapture(), longest=context + STEPS)
    captured = f"{time.perf_counter() - began:.1f} s, {(free - _free_bytes(device)) / 2**20:.0f} MiB"
    yield Result(
        "model", "capture of all buckets", f"up to {batch}", NOT_MEASURED if is_dry else captured, "", "", "ran"
    )
    drawn: list[list[list[int]]] = []
    for kind, run in kinds.items():
        for is_ahead in (False, True):
            seconds, tokens = _decode(step, run, tables, context, steps, is_ahead=is_ahead)
            drawn.append(tokens)
            name = f"decode, {kind}, {'queued ahead' if is_ahead else 'waited for'}"
            yield _row(is_dry, name, f"{batch} x {context}", seconds, num_bytes / BYTES_PER_MS, batch)
    differ = sum(tokens != drawn[0] for tokens in drawn)
    yield Result("model", "decode: runs with other tokens", "", str(differ), "<= 0", "", "WRONG" if differ else "ok")


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


def _free_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _prefill(model: Decoder, memory: KvMemory, tables: list[list[int]], chunk: int, device: torch.device) -> float:
    begin = time.perf_counter()
    config = model.config
    ids = torch.randint(5, config.vocab_size, (chunk,)).to(device)
    batch = PagedBatch.build([chunk], [chunk], tables[:1], 16)
    placed = place(batch, group_size=config.group_size, head_dim=config.head_dim, device=device)
    hidden = model.forward(ids, torch.arange(chunk, device=device), placed, memory)
    model.logits(hidden[-1:]).cpu()
    return time.perf_counter() - begin


def _decode(
    step: DecodeStep, steps: DecodeSteps, tables: list[list[int]], context: int, count: int, *, is_ahead: bool
) -> tuple[float, list[list[int]]]:
    """Seconds of a step, the first two left out (kernels are compiled, the queue fills), and the tokens of all."""
    copies: list[HostCopy] = []
    tokens: list[list[int]] = []
    ends: list[float] = []
    for number in range(count):
        position = context + number
        step.fill([_row_at(row, position, table, is_first=number == 0) for row, table in enumerate(tables)])
        steps.run(len(tables), position + 1)
        copies.append(HostCopy(step.drawn[: len(tables)]))
        while len(tokens) < len(copies) - is_ahead:
            tokens += copies[len(tokens)].lists()
            ends.append(time.perf_counter())
    while len(tokens) < len(copies):
        tokens += copies[len(tokens)].lists()
    if any(token < 0 for row in tokens for token in row):
        raise RuntimeError("nothing was drawn: logits are not finite")
    gaps = [end - begin for begin, end in pairwise(ends)]
    return statistics.median(gaps[1:] or gaps), tokens


def _row_at(row: int, position: int, table: list[int], *, is_first: bool) -> DecodeRow:
    """The first step's token is known, the others' are those of the step before."""
    sample = SampleRow(row, SamplingParams(), row, 0, position + 1)
    return DecodeRow(sample, position, [table], [], token_id=5, source=None if is_first else row)
