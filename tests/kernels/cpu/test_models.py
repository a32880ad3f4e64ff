"""Whole models on the native kernels: the reference's logits and tokens, and the same bits on every path."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.models.registry import load_model
from kernels.cpu.native import NativeKernels
from tests.engine.model_harness import TinyModel, random_prompt
from tests.kernels.cpu.harness import assert_same_bits

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]


def model_on(native: NativeKernels, path: Path, block_size: int = 4) -> TinyModel:
    run = TinyModel(path, block_size=block_size)
    run.model = load_model(run.config, native)
    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_agrees_with_the_reference(tiny_model: Callable[..., Path], native: NativeKernels, family: str) -> None:
    path = tiny_model(family, seed=1, dtype="float32")
    tokens = random_prompt(75, seed=7)
    expected = TinyModel(path, kernels="reference").logits(tokens)
    result = model_on(native, path).logits(tokens)
    assert (result - expected).abs().max() < 2e-5 * expected.abs().max()
    assert torch.equal(result.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["mistral", "gemma3"])  # windows; QK-norm, 1 + w norms, GELU, one kv head
def test_every_path_gives_the_same_bits(
    tiny_model: Callable[..., Path], native: NativeKernels, dtype: torch.dtype, family: str
) -> None:
    path = tiny_model(family, seed=1, dtype=str(dtype).removeprefix("torch."))
    tokens = random_prompt(75, seed=7)
    expected = model_on(native, path, block_size=16).logits(tokens)
    run = model_on(native, path)
    for chunk in (1, 4, 32):
        assert_same_bits(run.logits(tokens, chunk), expected)
    run = model_on(native, path)
    place, neighbour = run.place(), run.place()
    begin = 0
    for step, size in enumerate([20, 1, 17, 1, 1, 30, 5]):
        other = (neighbour, random_prompt(1 + 6 * (step % 2), seed=step))
        assert_same_bits(run.step(other, (place, tokens[begin : begin + size]))[1], expected[begin : begin + size])
        begin += size
