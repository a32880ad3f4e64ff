"""A 4-bit copy of a dense model, as compressed-tensors writes one: nearest numbers, symmetric, a scale for 128 columns.

No calibration: for speed, not for quality.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128


def four_bit_copy(model: Path, directory: Path, *, head: bool) -> Path:
    """Write it to the new `directory`; `head`: the output matrix too, which a tied model then has apart."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    if head and config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        config["tie_word_embeddings"] = False
    ignored = () if head else ("lm_head",)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignored),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(_stored(tensors, ignored)), directory / "model.safetensors")
    return directory


def _stored(tensors: dict[str, Tensor], ignored: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or tensor.dim() != 2 or "embed_tokens" in name or module in ignored:
            yield name, tensor
            continue
        rows, columns = tensor.shape
        groups = tensor.float().view(rows, columns // GROUP, GROUP)
        scales = (groups.abs().amax(2) / 7).to(torch.bfloat16)
        steps = torch.where(scales == 0, 1.0, scales.float())
        codes = (torch.round(groups / steps[:, :, None]).clamp(-8, 7) + 8).int().view(rows, columns // 8, 8)
        yield f"{module}.weight_packed", (codes << torch.arange(0, 32, 4, dtype=torch.int32)).sum(2, dtype=torch.int32)
        yield f"{module}.weight_scale", scales
        yield f"{module}.weight_shape", torch.tensor([rows, columns])
