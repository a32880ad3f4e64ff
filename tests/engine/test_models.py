"""Each family against transformers' generate, in float32: the same greedy tokens through chunks and a paged cache."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.model_harness import KERNELS, TinyModel, hugging_face, hugging_face_logits, random_prompt

Tiny = Callable[..., Path]

LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 12.0],
}
# Seeds whose margins are wide enough at every step below; the test checks that they are.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"seed": 2},
    "mistral": {"seed": 0},
    "qwen2": {"seed": 3},
    "qwen3": {"seed": 1},
    "gemma3": {"seed": 0},
    "llama: one kv head, tied, biases": {
        "seed": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "llama: as many kv heads": {"seed": 4, "num_key_value_heads": 4},
    "qwen2: windows in the upper layer": {
        "seed": 0,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3: untied, biases": {"seed": 1, "tie_word_embeddings": False, "attention_bias": True},
    "mixtral": {"seed": 0},
    "qwen3_moe": {"seed": 1},
    "qwen3_moe: every second layer, weights as they are": {
        "seed": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "num_hidden_layers": 4,
    },
    "phi3": {"seed": 0},
    "phi3: part of each head, longrope, windows": {
        "seed": 1,
        "partial_rotary_factor": 0.75,
        "sliding_window": 13,
        "rope_scaling": LONGROPE,
    },
    "deepseek_v2": {"seed": 1},
    "deepseek_v2: latent of the queries, groups of experts, biases": {
        "seed": 4,
        "q_lora_rank": 24,
        "attention_bias": True,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_scaling": None,
        "num_hidden_layers": 3,
    },
    "deepseek_v3": {"seed": 2},
    "deepseek_v3: every group, halves rotated, no latent of the queries": {
        "seed": 0,
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale_all_dim": 1.0},
    },
    "gemma3: final soft cap": {"seed": 0, "final_logit_softcapping": 10.0},
}
PLACES = [(4, 3), (16, 5), (4, 64), (16, 33)]
"""(block size, chunk): chunks smaller and larger than a block, never a whole number of them except 64."""
NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 3, 4, 15, 16, 17, 50)


def make(tiny_model: Tiny, name: str) -> Path:
    return tiny_model(name.split(":")[0], **MODELS[name])


LATER = ("mixtral", "qwen3_moe", "phi3", "deepseek_v2", "deepseek_v3")
BY_DAY = {("llama", "torch"), ("gemma3", "reference")}


def is_nightly(name: str, kernels: str) -> bool:
    """What a variant or another family has of its own is the model's, not the kernels': native is enough by day.

    Each other set has one family by day; test_models_rows.py compares its paths in the rest.
    """
    family, _, variant = name.partition(":")
    return (bool(variant) and family in LATER) or (kernels != "native" and (name, kernels) not in BY_DAY)


CASES = [
    pytest.param(name, kernels, marks=pytest.mark.nightly if is_nightly(name, kernels) else ())
    for name, kernels in product(MODELS, KERNELS)
]


@pytest.mark.parametrize(("name", "kernels"), CASES)
def test_greedy_tokens_equal_transformers(tiny_model: Tiny, name: str, kernels: str) -> None:
    path = make(tiny_model, name)
    oracle = hugging_face(path)
    for number, length in enumerate(PROMPT_LENGTHS):
        prompt = random_prompt(length, seed=length)
        expected = oracle.generate(prompt[None], max_new_tokens=NUM_TOKENS, do_sample=False)[0, length:]
        # On the oracle's own text: how far are we off, and does every choice stand far enough apart?
        text = torch.cat([prompt, expected])[:-1]
        reference = hugging_face_logits(oracle, text)
        run = TinyModel(path, kernels=kernels, max_tokens=80, num_sequences=1)
        error = (run.logits(text) - reference).abs().max()
        best = reference[length - 1 :].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 100 * error, "the fixture's margins are too small: choose another seed"
        for block_size, chunk in (PLACES[number % 4], PLACES[(number + 1) % 4]):
            run = TinyModel(path, kernels=kernels, block_size=block_size, max_tokens=80, num_sequences=1)
            assert run.greedy(prompt, NUM_TOKENS, chunk) == expected.tolist(), f"{length=} {block_size=} {chunk=}"


def test_gemma3_inside_a_multimodal_checkpoint(tiny_model: Tiny, tmp_path: Path) -> None:
    """Gemma3ForConditionalGeneration: its text_config and language-model tensors; the vision tower is left alone."""
    text_path = make(tiny_model, "gemma3")
    text = json.loads((text_path / "config.json").read_text())
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8},
        "eos_token_id": [2, 4],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(text_path / "model.safetensors")
    prompt = random_prompt(30, seed=1)
    expected = TinyModel(text_path).logits(prompt)
    for prefix in ("language_model.", "model.language_model."):
        renamed = {prefix + (n if prefix[0] == "l" else n.removeprefix("model.")): t for n, t in weights.items()}
        renamed["vision_tower.patch.weight"] = torch.zeros(3)
        save_file(renamed, tmp_path / "model.safetensors")
        run = TinyModel(tmp_path)
        assert torch.equal(run.logits(prompt), expected)
        assert run.config.eos_token_ids == (2, 4)
