"""Phi's own: rotation of a part of each head, LongRoPE with one fixed set of factors, adapters on fused projections."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ModelError
from engine.longrope import read_phi_rope
from engine.lora.checkpoint import modules_of, read_adapter
from engine.model_config import load_model_config
from engine.rope import RopeConfig, inverse_frequencies
from tests.engine.model_harness import KERNELS, TinyModel, hugging_face, hugging_face_logits, random_prompt
from tests.engine.test_models import LONGROPE
from tests.tiny_adapters import make_adapter

Tiny = Callable[..., Path]
ORIGINAL = 20
LONG = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": ORIGINAL, "rope_scaling": LONGROPE}


@pytest.mark.parametrize("kernels", KERNELS)
def test_short_and_long_factors_as_transformers(tiny_model: Tiny, kernels: str) -> None:
    """Short ones for an engine whose sequences end at the original length; long ones else, equal past that length."""
    path = tiny_model("phi3", seed=1, **LONG)
    oracle = hugging_face(path)
    for limit, length in ((ORIGINAL, ORIGINAL), (None, 60), (ORIGINAL + 1, ORIGINAL + 1)):
        tokens = random_prompt(length, seed=3)
        expected = hugging_face_logits(oracle, tokens)
        run = TinyModel(path, kernels=kernels, max_model_len=limit)
        logits = run.logits(tokens)
        assert (logits - expected).abs().max() < 1e-3, limit  # float32 on both sides, logits of size up to 15
        assert torch.equal(run.logits(tokens, 7), logits), limit  # chunks don't change factors


def test_the_factors_are_chosen_once_and_named(tiny_model: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_model("phi3", seed=1, **LONG)
    short = load_model_config(path, max_model_len=ORIGINAL)
    assert not caplog.records
    long = load_model_config(path, max_model_len=ORIGINAL + 1)
    assert "long factors serve every length, since max_model_len = 21 is above the 20 tokens" in caplog.text
    assert (short.layer_ropes[0].divisors[-1], long.layer_ropes[0].divisors[-1]) == (2.5, 12.0)
    assert short.kv_config() != long.kv_config()
    json.dumps(long.kv_config())
    assert load_model_config(path).kv_config() == long.kv_config()
    tokens = random_prompt(15, seed=3)
    logits = [TinyModel(path, max_model_len=limit).logits(tokens) for limit in (ORIGINAL, None)]
    assert (logits[0] - logits[1]).abs().max() > 0.05


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"partial_rotary_factor": 0.7, "rope_scaling": None},
        "partial_rotary_factor is 0.7; it must give an even part",
    ),
    ({"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "short_factor"),
    ({"rope_scaling": LONGROPE | {"long_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]}}, r"long_factor is .*6 positive"),
    ({"rope_scaling": LONGROPE | {"factor": 0}}, "factor is 0"),
    ({"rope_scaling": LONGROPE | {"long_mscale": 1.2}}, "long_mscale is 1.2; longrope with it is not supported"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "longrope"),
]


def test_what_can_not_be_served(tiny_model: Tiny, tmp_path: Path) -> None:
    whole = json.loads((tiny_model("phi3", seed=1, **LONG) / "config.json").read_text())
    for values, message in REFUSED:
        (tmp_path / "config.json").write_text(json.dumps(whole | values))
        with pytest.raises(ModelError, match=message) as caught:
            load_model_config(tmp_path)
        assert "config.json" in str(caught.value)


def test_frequencies_are_those_of_the_rotated_part() -> None:
    values = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    whole = RopeConfig.read(values)
    part = read_phi_rope(values | {"partial_rotary_factor": 0.5}, head_dim=64, max_position=512, longest=512)
    assert part.rotary_dim == 32
    found, wanted = inverse_frequencies(part, 64), inverse_frequencies(whole, 32)
    assert torch.equal(found[0], wanted[0])
    assert found[1] == wanted[1]


def test_partial_rotation_is_phis_alone(tiny_model: Tiny) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    with pytest.raises(ModelError, match=r"partial_rotary_factor 0\.5 is not supported; only 1\.0 is"):
        load_model_config(tiny_model("llama", rope_parameters=rope))


def test_a_fused_tensor_of_another_size_is_named(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tiny_model("phi3", seed=1)
    config = json.loads((path / "config.json").read_text()) | {"num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    with pytest.raises(ModelError, match=r"qkv_proj\.weight is \[128, 64\]; the config asks for \[96, 64\]"):
        TinyModel(tmp_path)


def test_an_adapters_fused_module_becomes_its_parts(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tiny_model("phi3", seed=1)
    model = TinyModel(path).model
    modules = modules_of(model.adaptable)
    assert {name for name in modules if "layers.1" in name} == {
        f"layers.1.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    directory = make_adapter(path, tmp_path / "a", targets=("qkv_proj", "gate_up_proj"))
    adapter = read_adapter(directory, model.config, modules, 8)
    stored = load_file(directory / "adapter_model.safetensors")
    name = "layers.1.self_attn"
    a, b = (stored[f"base_model.model.model.{name}.qkv_proj.lora_{kind}.weight"] for kind in "AB")
    parts = [adapter.modules[f"{name}.{part}_proj"] for part in "qkv"]
    assert [part.b.shape[1] for part in parts] == [64, 32, 32]
    assert all(torch.equal(part.a, a) for part in parts)
    assert torch.allclose(torch.cat([part.b for part in parts], dim=1).t(), b * 2.0)  # alpha / rank
