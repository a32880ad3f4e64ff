"""Reading config.json: what each family becomes, and one clear error for what can't be served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelError
from engine.model_config import load_model_config
from engine.rope import RopeConfig
from tests.tiny_models import make_tiny_model

Tiny = Callable[..., Path]


def changed(source: Path, target: Path, **values: Any) -> Path:
    """A copy of the model's config.json with some fields replaced (None removes one)."""
    config = json.loads((source / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


def test_llama(tiny_model: Tiny) -> None:
    config = load_model_config(tiny_model("llama"))
    assert (config.architecture, config.family, config.dtype) == ("LlamaForCausalLM", "llama", torch.float32)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert (config.hidden_size, config.vocab_size, config.max_position) == (64, 300, 512)
    assert config.layer_windows == (None, None, None)
    assert config.eos_token_ids == (2,)
    assert not config.qkv_bias
    assert config.attention_scale == 0.25


def test_gemma3(tiny_model: Tiny) -> None:
    config = load_model_config(tiny_model("gemma3"))
    assert config.layer_windows == (19, 19, None, 19)
    local, glob = RopeConfig("default", 10000.0), RopeConfig("default", 1000000.0)
    assert config.layer_ropes == (local, local, glob, local)
    assert (config.embedding_scale, config.attention_scale) == (8.0, 24**-0.5)
    assert config.norm_unit_offset
    assert config.qk_norm


def test_gemma3_rope_scaling_is_for_the_full_layers(tiny_model: Tiny) -> None:
    config = load_model_config(tiny_model("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert config.layer_ropes[0].kind == "default"
    assert config.layer_ropes[2] == RopeConfig("linear", 1000000.0, (("factor", 8.0),))


def test_qwen2_windows_need_to_be_enabled(tiny_model: Tiny) -> None:
    off = load_model_config(tiny_model("qwen2", sliding_window=9, max_window_layers=1))
    on = load_model_config(tiny_model("qwen2", sliding_window=9, max_window_layers=1, use_sliding_window=True))
    assert (off.layer_windows, on.layer_windows) == ((None, None), (None, 9))
    assert on.qkv_bias
    assert not on.output_bias


def test_generation_config_decides_what_ends_a_sequence(tiny_model: Tiny, tmp_path: Path) -> None:
    changed(tiny_model("llama"), tmp_path, eos_token_id=[2, 9])
    assert load_model_config(tmp_path).eos_token_ids == (2, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 7]}')
    assert load_model_config(tmp_path).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float16", "auto", torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(tiny_model: Tiny, tmp_path: Path, stored: str, wanted: str, expected: torch.dtype) -> None:
    assert load_model_config(changed(tiny_model("llama"), tmp_path, dtype=stored), dtype=wanted).dtype == expected


def test_kv_config_tells_apart_what_changes_kv_values(tiny_model: Tiny, tmp_path: Path) -> None:
    base = load_model_config(tiny_model("gemma3")).kv_config()
    json.dumps(base)  # it is hashed as JSON types
    for values in (
        {"rms_norm_eps": 1e-5},
        {"sliding_window": 20},
        {"rope_theta": 1000.0},
        {"query_pre_attn_scalar": 16},
        {"attn_logit_softcapping": 50.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ):
        changed(tiny_model("gemma3"), tmp_path, **values)
        assert load_model_config(tmp_path).kv_config() != base, values
    moved = changed(tiny_model("gemma3"), tmp_path, max_position_embeddings=256, final_logit_softcapping=3.0)
    assert load_model_config(moved).kv_config() == base


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"architecture 'MambaForCausalLM'.* is not supported; supported are"),
        ({"architectures": None}, "architecture '' "),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported; supported are silu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"num_key_value_heads": 3}, "4 heads over 3 kv heads"),
        ({"head_dim": 2048}, "head_dim is 2048; it must be at most 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits is None; supported: 4, 8"),
    ],
)
def test_what_can_not_be_served(tiny_model: Tiny, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    changed(tiny_model("llama"), tmp_path, **values)
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(tmp_path)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gemma3_with_bidirectional_attention_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="use_bidirectional_attention is not supported"):
        load_model_config(changed(tiny_model("gemma3"), tmp_path, use_bidirectional_attention=True))


def test_unknown_dtype(tiny_model: Tiny) -> None:
    with pytest.raises(ModelError, match="dtype 'int4' is not supported; supported are auto, float32, bfloat16"):
        load_model_config(tiny_model("llama"), dtype="int4")


def test_broken_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="/nowhere: no such directory"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: holds a list, not a JSON object"):
        load_model_config(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match="eos_token_id is '</s>'"):
        load_model_config(path)
