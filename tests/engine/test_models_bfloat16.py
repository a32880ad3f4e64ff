"""bfloat16: log-probabilities against transformers, in bfloat16 and in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.model_harness import KERNELS, TinyModel, hugging_face, hugging_face_logits, random_prompt

NAMES = ("mixtral", "qwen3_moe", "phi3", "gpt2", "deepseek_v2", "deepseek_v3")
LATER = [pytest.param(family, marks=pytest.mark.nightly) for family in NAMES]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", [*("llama", "qwen2", "qwen3", "gemma3"), *LATER])
def test_logprobs_are_near_those_of_transformers(tiny_model: Callable[..., Path], family: str, kernels: str) -> None:
    """Stated tolerance: on average 0.1 nats over the ten likeliest tokens of each position, and no farther from the
    float32 result than transformers' own bfloat16 is (times 1.25: both are noise of the same kind).

    These models are harsh: random weights amplify each rounding (2^-9) where trained ones dampen it.
    """
    path = tiny_model(family, seed=1, dtype="bfloat16")
    tokens = random_prompt(100, seed=1)
    exact = hugging_face_logits(hugging_face(path, torch.float32), tokens).log_softmax(-1)
    theirs = hugging_face_logits(hugging_face(path, torch.bfloat16), tokens).log_softmax(-1)
    run = TinyModel(path, kernels=kernels)
    assert run.config.dtype == torch.bfloat16
    ours = run.logits(tokens).log_softmax(-1)
    top = exact.topk(10).indices
    to_exact, to_theirs, noise = (
        float((a - b).gather(1, top).abs().mean()) for a, b in ((ours, exact), (ours, theirs), (theirs, exact))
    )
    assert to_exact < 1.25 * noise
    assert to_theirs < 0.1
