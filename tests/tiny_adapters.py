"""Random LoRA adapters for the tiny models, as PEFT writes them, and merged into the weights by plain torch."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: Path,
    directory: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = ALL,
    strength: float = 0.35,
    rank_pattern: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """One whose output differs from the base's at about every token; `targets` may have embed_tokens and lm_head."""
    generator = torch.Generator().manual_seed(1000 + seed)
    weights = load_file(model / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        own = next((r for key, r in (rank_pattern or {}).items() if module.endswith(key)), rank)
        if not name.endswith(".weight") or module.rpartition(".")[2] not in targets:
            continue
        rows, columns = weight.shape
        if module.endswith("embed_tokens"):
            a, b = torch.randn(own, rows, generator=generator), torch.randn(columns, own, generator=generator)
            ends = "lora_embedding_A", "lora_embedding_B"
            size = float(weight.float().std())
        else:
            a, b = torch.randn(own, columns, generator=generator), torch.randn(rows, own, generator=generator)
            ends = "lora_A.weight", "lora_B.weight"
            size = float(weight.float().std())
        scale = alpha / (math.sqrt(own) if config.get("use_rslora") else own)
        tensors[f"base_model.model.{module}.{ends[0]}"] = a
        tensors[f"base_model.model.{module}.{ends[1]}"] = b * (strength * size / scale / math.sqrt(own))
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    values |= {"rank_pattern": dict(rank_pattern or {})} | config
    write_adapter(directory, values, tensors)
    return directory


def write_adapter(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """The two files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")


def merge(model: Path, adapter: Path, directory: Path) -> Path:
    """The model with W + alpha / r · B A for every W that the adapter changes."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / "model.safetensors")
    for name, a in tensors.items():
        if "lora_A" not in name and "lora_embedding_A" not in name:
            continue
        b = tensors[name.replace("_A", "_B")]
        rank = a.shape[0]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        product = (b.double() @ a.double()) * scale
        target = name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight"
        delta = product.t() if "embedding" in name else product
        weights[target] = (weights[target].double() + delta).to(weights[target].dtype).contiguous()
    shutil.copytree(model, directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
