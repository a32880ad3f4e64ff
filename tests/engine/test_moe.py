"""Experts: the same bits for a row in any company, every stored form, and what is said about what can't be served."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.kernel_set import load_kernel_set
from engine.lora.checkpoint import modules_of, read_adapter
from engine.lora.errors import AdapterError
from engine.model_config import load_model_config
from engine.models.registry import load_model
from engine.moe_config import MoeConfig
from kernels import cpu
from kernels.int8 import Quantization
from tests.engine.model_harness import KERNELS, TinyModel, hugging_face, random_prompt
from tests.tiny_adapters import make_adapter

Tiny = Callable[..., Path]
AVAILABLE = KERNELS if cpu.available() else KERNELS[:2]


QUANTIZATIONS: tuple[Quantization | None, ...] = (None, "int8", "w8a8")


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_depends_on_itself_alone(tiny_model: Tiny, kernels: str) -> None:
    """M = 1 against M = n, in any order, and when all rows want the same experts."""
    if kernels == "native" and not cpu.available():
        pytest.skip(cpu.why_unavailable())
    for dtype, quantization in product(("float32", "bfloat16"), QUANTIZATIONS):
        check_rows(tiny_model, kernels, dtype, quantization)


def check_rows(tiny_model: Tiny, kernels: str, dtype: str, quantization: Quantization | None) -> None:
    config = load_model_config(tiny_model("mixtral", seed=1, dtype=dtype))
    model = load_model(config, load_kernel_set(kernels, quantization=quantization))
    mlp: Any = model.blocks[0]
    x = torch.randn(37, config.hidden_size, generator=torch.Generator().manual_seed(5)).to(config.dtype)
    step: Any = SimpleNamespace(group=None)
    with torch.inference_mode():
        together = mlp.mlp(x, step)
        order = torch.randperm(37, generator=torch.Generator().manual_seed(6))
        assert torch.equal(mlp.mlp(x[order], step), together[order])
        for row in range(37):
            assert torch.equal(mlp.mlp(x[row : row + 1], step)[0], together[row]), row
        crowd = torch.cat([x[3:4].expand(20, -1), x[:5]])
        assert torch.equal(mlp.mlp(crowd, step), torch.cat([together[3:4].expand(20, -1), together[:5]]))


def test_the_router_is_never_quantized() -> None:
    x, weight = torch.randn(5, 64), torch.randn(6, 64)
    for kernels in AVAILABLE:
        plain, quantized = (load_kernel_set(kernels, quantization=q).router_logits(x, weight) for q in (None, "w8a8"))
        assert torch.equal(plain, quantized), kernels
        assert (plain - x.double() @ weight.double().T).abs().max() < 1e-5
        assert plain.dtype == torch.float32


def test_kernel_sets_agree_on_quantized_experts(tiny_model: Tiny) -> None:
    for quantization in QUANTIZATIONS[1:]:
        check_agreement(tiny_model, quantization)


def check_agreement(tiny_model: Tiny, quantization: Quantization | None) -> None:
    tokens = random_prompt(20, seed=2)
    found = {}
    for kernels in AVAILABLE:
        run = TinyModel(tiny_model("mixtral", seed=1), kernels=kernels)
        run.model = load_model(run.config, load_kernel_set(kernels, quantization=quantization))
        found[kernels] = run.logits(tokens)
    change = (
        (TinyModel(tiny_model("mixtral", seed=1), kernels="reference").logits(tokens) - found["reference"]).abs().max()
    )
    assert change > 1e-2
    for kernels, logits in found.items():
        assert (logits - found["reference"]).abs().max() < (0.002 if quantization == "int8" else 0.3) * change, kernels


def test_fused_experts_are_the_same_experts(tiny_model: Tiny, tmp_path: Path) -> None:
    """As transformers 5 writes them: the hub's form, or one tensor for all experts; also converted to another dtype."""
    for family in ("mixtral", "qwen3_moe"):
        check_fused(tiny_model(family, seed=1), tmp_path / family)


def check_fused(path: Path, tmp_path: Path) -> None:
    tokens = random_prompt(20, seed=2)
    expected = TinyModel(path).logits(tokens)
    hugging_face(path).save_pretrained(tmp_path / "hub")
    hugging_face(path).save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    assert not any(".experts.0." in name for name in names)
    for form in ("hub", "fused"):
        assert torch.equal(TinyModel(tmp_path / form).logits(tokens), expected), form
    converted = TinyModel(tmp_path / "fused", dtype="bfloat16").logits(tokens)
    assert torch.equal(TinyModel(path, dtype="bfloat16").logits(tokens), converted)


def test_an_expert_too_few_or_too_many_is_named(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tiny_model("qwen3_moe", seed=1)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"model.layers.1.mlp.experts.6.up_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"not part of this architecture: model\.layers\.1\.mlp\.experts\.6\.up_proj"):
        TinyModel(tmp_path)
    del tensors["model.layers.1.mlp.experts.4.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.4\.down_proj\.weight \[64, 48\] is missing"):
        TinyModel(tmp_path)


def test_configs(tiny_model: Tiny) -> None:
    mixtral, qwen = (load_model_config(tiny_model(family)).moe for family in ("mixtral", "qwen3_moe"))
    assert mixtral == MoeConfig(4, 2, 112, True, (True, True))
    assert qwen == MoeConfig(6, 3, 48, True, (False, True))
    assert load_model_config(tiny_model("llama")).moe is None


def test_what_changes_kv_values_is_in_the_keys(tiny_model: Tiny) -> None:
    config = load_model_config(tiny_model("qwen3_moe"))
    assert config.moe is not None
    base = config.kv_config()
    json.dumps(base)
    for values in ({"top_k": 2}, {"normalize": False}, {"layers": (True, True)}):
        assert replace(config, moe=replace(config.moe, **values)).kv_config() != base


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be at most the number of experts, 6"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ({"num_experts": 0}, "num_experts is 0"),
    ({"mlp_only_layers": [2]}, r"mlp_only_layers is \[2\]; it must list layers from 0 to 1"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
]


def test_what_can_not_be_served(tiny_model: Tiny, tmp_path: Path) -> None:
    whole = json.loads((tiny_model("qwen3_moe") / "config.json").read_text())
    for values, message in REFUSED:
        (tmp_path / "config.json").write_text(json.dumps(whole | values))
        with pytest.raises(ModelError, match=message):
            load_model_config(tmp_path)


def test_adapters_on_experts_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tiny_model("qwen3_moe", seed=1)
    model = TinyModel(path).model
    modules = modules_of(model.adaptable)
    attention = make_adapter(path, tmp_path / "attention", targets=("q_proj", "o_proj"))
    assert read_adapter(attention, model.config, modules, 8).rank == 4
    experts = make_adapter(path, tmp_path / "experts", targets=("q_proj", "up_proj"))
    with pytest.raises(
        AdapterError, match=r"experts\.0\.up_proj.* changes an expert; adapters on experts are not serv"
    ):
        read_adapter(experts, model.config, modules, 8)
