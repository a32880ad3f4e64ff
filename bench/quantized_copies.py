"""Quantized copies of a dense model, a directory for each format: nearest numbers, no calibration.

For speed, and for what kernels lose against the same weights in float32; calibrated checkpoints are better ones.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
_AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # the row of W whose code is in bits 4 i … 4 i + 3 of a number

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """A `quantization_config`, and the tensors of one matrix [N, K], by suffix."""

    config: dict[str, Any]
    make: Callable[[Tensor], Tensors]


def quantized_copy(model: Path, directory: Path, name: str, *, head: bool = False) -> Path:
    """Write the copy in the format `name` to the new `directory`.

    `head`: the output matrix too, which a tied model then has apart.
    """
    made = FORMATS[name]
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    if head and config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        config["tie_word_embeddings"] = False
    stored: Tensors = {}
    for tensor_name, tensor in tensors.items():
        module, _, kind = tensor_name.rpartition(".")
        if kind != "weight" or tensor.dim() != 2 or "embed_tokens" in module or (module == "lm_head" and not head):
            stored[tensor_name] = tensor
        else:
            stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in made.make(tensor.float()).items()}
    config["quantization_config"] = made.config
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(stored, directory / "model.safetensors")
    return directory


def _gptq(bits: int) -> Format:
    def make(weight: Tensor) -> Tensors:
        codes, zeros, scales = _nearest(weight, bits)
        packed = {"qweight": _packed(codes, bits).T, "qzeros": _packed(zeros.T - 1, bits)}
        return packed | {"scales": scales.T.half()}

    return Format({"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False}, make)


def _awq() -> Format:
    def make(weight: Tensor) -> Tensors:
        codes, zeros, scales = _nearest(weight, 4)
        return {
            "qweight": _packed(_interleaved(codes.T), 4),
            "qzeros": _packed(_interleaved(zeros.T), 4),
            "scales": scales.T.half(),
        }

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Format(config, make)


def _interleaved(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], -1, 8)[:, :, _AWQ_PLACES].flatten(1)


def _symmetric(bits: int) -> Format:
    """compressed-tensors' "pack-quantized"."""
    top = (1 << bits - 1) - 1

    def make(weight: Tensor) -> Tensors:
        groups = weight.view(weight.shape[0], -1, GROUP)
        scales = (groups.abs().amax(2) / top).bfloat16()
        steps = torch.where(scales == 0, 1.0, scales.float())[:, :, None]
        codes = (torch.round(groups / steps).clamp(-top - 1, top) + top + 1).int().flatten(1)
        shape = torch.tensor(weight.shape)
        return {"weight_packed": _packed(codes, bits), "weight_scale": scales, "weight_shape": shape}

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return Format(_compressed("pack-quantized", weights), make)


def _float8() -> Format:
    """compressed-tensors' "float-quantized", a scale for each row."""

    def make(weight: Tensor) -> Tensors:
        scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        return {"weight": _to_float8(weight, scales.float()), "weight_scale": scales}

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return Format(_compressed("float-quantized", weights), make)


def _float8_blocks() -> Format:
    """DeepSeek-V3's, a scale for each 128 x 128."""

    def make(weight: Tensor) -> Tensors:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % GROUP, 0, -rows % GROUP))
        blocks = padded.view(padded.shape[0] // GROUP, GROUP, -1, GROUP)
        scales = blocks.abs().amax((1, 3)) / 448
        by_number = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:rows, :columns]
        return {"weight": _to_float8(weight, by_number), "weight_scale_inv": scales}

    return Format({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]}, make)


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def _nearest(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int32 [N, K], zeros int32 [N, G] from 1 on, float16 scales [N, G]."""
    top = (1 << bits) - 1
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / top).half()
    steps = torch.where(scales == 0, 1.0, scales.float())
    zeros = torch.round(-low / steps).clamp(1, top)
    codes = (torch.round(groups / steps[:, :, None]) + zeros[:, :, None]).clamp(0, top)
    return codes.int().flatten(1), zeros.int(), scales


def _packed(codes: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> [..., n · bits / 32], the first code in the lowest bits."""
    numbers = codes.reshape(*codes.shape[:-1], -1, 32 // bits)
    return (numbers << torch.arange(0, 32, bits, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def _to_float8(weight: Tensor, scales: Tensor) -> Tensor:
    steps = torch.where(scales == 0, 1.0, scales)
    return (weight / steps).clamp(-448, 448).to(torch.float8_e4m3fn)


FORMATS = {
    "gptq4": _gptq(4),
    "gptq8": _gptq(8),
    "awq4": _awq(),
    "w4a16": _symmetric(4),
    "w8a16": _symmetric(8),
    "fp8": _float8(),
    "fp8_blocks": _float8_blocks(),
}
