"""Rope scaling: logits against transformers for each variant of the served families, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.rope import RopeConfig
from tests.engine.model_harness import TinyModel, hugging_face, hugging_face_logits, random_prompt

VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with everything": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn with its factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 256,
    },
    "the old name": {"type": "linear", "factor": 2.0},
}


# transformers reads Gemma 3's scaling under the new name only.
CASES = [(f, v) for f in ("llama", "qwen3", "gemma3") for v in VARIANTS if (f, v) != ("gemma3", "the old name")]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_equal_transformers(tiny_model: Callable[..., Path], family: str, variant: str) -> None:
    path = tiny_model(family, rope_scaling=VARIANTS[variant])
    plain = tiny_model(family)
    tokens = random_prompt(150, seed=3)
    expected = hugging_face_logits(hugging_face(path), tokens)
    logits = TinyModel(path, kernels="reference").logits(tokens)
    # float32 on both sides, logits of size up to 15
    assert (logits - expected).abs().max() < 5e-4
    differs = (TinyModel(plain, kernels="reference").logits(tokens) - logits).abs().max()
    assert (differs > 0.05) == (variant != "dynamic")  # dynamic changes nothing before max_position_embeddings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "longrope", "rope_theta": 1.0}, "rope_type 'longrope' is not supported"),
        ({"rope_type": "linear", "rope_theta": 1.0}, "rope_type 'linear' needs a positive number factor, not None"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.read(values)
