"""A token's logits are the same bits on every path: one shot, chunks, decode steps, any neighbours, any blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.kernel_set import load_kernel_set
from tests.engine.model_harness import KERNELS, TinyModel, random_prompt

LENGTH = 75
LATER = ("mistral", "mixtral", "qwen3_moe", "phi3", "deepseek_v2", "deepseek_v3")
# Mistral loads as Llama does.
FAMILIES = [
    *("llama", "qwen2", "qwen3", "gemma3"),
    *(pytest.param(family, marks=pytest.mark.nightly) for family in LATER),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_gives_the_same_bits(tiny_model: Callable[..., Path], family: str, kernels: str, dtype: str) -> None:
    path = tiny_model(family, seed=1, dtype=dtype)
    tokens = random_prompt(LENGTH, seed=7)
    expected = TinyModel(path, kernels=kernels, block_size=16).logits(tokens)
    assert expected.std() > 0.5  # it is not all the same number

    run = TinyModel(path, kernels=kernels, block_size=4)
    for chunk in (1, 3, 4, 32):
        assert torch.equal(run.logits(tokens, chunk), expected), f"chunks of {chunk}"

    run = TinyModel(path, kernels=kernels, block_size=4)
    place, neighbours = run.place(), [run.place(), run.place()]
    begin = 0
    for step, size in enumerate([20, 1, 17, 1, 1, 30, 5]):
        others = [(other, random_prompt(1 + 6 * (step % 2), seed=i)) for i, other in enumerate(neighbours)]
        logits = run.step(others[0], (place, tokens[begin : begin + size]), *others[1:])[1]
        assert torch.equal(logits, expected[begin : begin + size]), f"tokens from {begin}, beside others"
        begin += size
    assert begin == LENGTH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_threads_changes_no_bit(tiny_model: Callable[..., Path], family: str, dtype: str) -> None:
    path = tiny_model(family, seed=1, dtype=dtype)
    tokens = random_prompt(LENGTH, seed=7)
    alone = TinyModel(path, kernels="native", threads=1).logits(tokens)
    for threads in (2, 3):
        run = TinyModel(path, kernels="native", threads=threads)
        for chunk in (LENGTH, 32, 1):
            assert torch.equal(run.logits(tokens, chunk), alone), f"{threads=} {chunk=}"
    load_kernel_set("native", threads=1)  # the pool is the process's: leave it as other tests expect it
