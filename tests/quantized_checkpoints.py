"""Tiny quantized checkpoints, packed number by number from each format's definition; and what they stand for, dense.

Independent of `engine/quantized`: plain Python integers, one code at a time, and the dequantized weights beside them.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column whose code is in bits 4 i … 4 i + 3 of a number."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Codes:
    """W[n, k] = (codes[n][k] - zeros[n][g]) · scales[n][g] with g = groups[k]."""

    codes: list[list[int]]
    zeros: list[list[int]]
    scales: Tensor
    groups: list[int]

    def dense(self) -> Tensor:
        rows = []
        for codes, zeros, scales in zip(self.codes, self.zeros, self.scales.tolist(), strict=True):
            rows.append([(code - zeros[g]) * scales[g] for code, g in zip(codes, self.groups, strict=True)])
        return torch.tensor(rows, dtype=torch.float64).float()


def quantize(
    weight: Tensor, bits: int, group_size: int, *, symmetric: bool, act_order: bool = False, dtype: torch.dtype
) -> Codes:
    """Round to the nearest within each group; with `act_order` groups are of columns that lie apart."""
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = [k // size for k in range(columns)]
    if act_order:
        shuffled = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)).tolist()
        groups = [groups[k] for k in shuffled]
    count, top = max(groups) + 1, (1 << bits) - 1
    scales, zeros = torch.zeros(rows, count), [[0] * count for _ in range(rows)]
    group_ids = torch.tensor(groups)
    for g in range(count):
        part = weight[:, group_ids == g]
        if symmetric:
            scales[:, g] = part.abs().amax(1) * 2 / top
            zero = torch.full((rows,), (top + 1) // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / top
            zero = torch.round(-low / scales[:, g]).long()
        for n in range(rows):
            zeros[n][g] = int(zero[n])
    scales = scales.to(dtype).float()
    wide = torch.round(weight / scales[:, group_ids]) + torch.tensor(zeros)[:, group_ids]
    return Codes(wide.clamp(0, top).long().tolist(), zeros, scales, groups)


def pack(codes: list[int], bits: int) -> int:
    """One int32, the first code in its lowest bits."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return number - (1 << 32) if number >= 1 << 31 else number


def packed(rows: Iterator[list[int]], bits: int) -> Tensor:
    """int32 [rows, row length · bits / 32]."""
    step = 32 // bits
    return torch.tensor([[pack(row[i : i + step], bits) for i in range(0, len(row), step)] for row in rows]).int()


def columns_of(values: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*values, strict=True)]


def gptq_tensors(q: Codes, bits: int, *, v2: bool, dtype: torch.dtype, g_idx: bool) -> Tensors:
    less = 0 if v2 else 1
    tensors = {
        "qweight": packed(iter(q.codes), bits).T.contiguous(),
        "qzeros": packed(([zero - less for zero in row] for row in columns_of(q.zeros)), bits),
        "scales": q.scales.T.to(dtype).contiguous(),
    }
    return tensors | ({"g_idx": torch.tensor(q.groups).int()} if g_idx else {})


def awq_tensors(q: Codes, dtype: torch.dtype) -> Tensors:
    def interleaved(row: list[int]) -> list[int]:
        return [row[start + place] for start in range(0, len(row), 8) for place in AWQ_ORDER]

    return {
        "qweight": packed((interleaved(row) for row in columns_of(q.codes)), 4),
        "qzeros": packed((interleaved(row) for row in columns_of(q.zeros)), 4),
        "scales": q.scales.T.to(dtype).contiguous(),
    }


@dataclass(frozen=True)
class Recipe:
    """A `quantization_config`, and how one matrix becomes tensors and the dense weight they stand for."""

    config: dict[str, Any]
    make: Callable[[Tensor], tuple[Tensors, Tensor]]
    kept: tuple[str, ...] = field(default=("lm_head",))
    """Modules left as they are: those whose names contain one of these."""


def gptq(
    bits: int = 4, group_size: int = 32, *, symmetric: bool = False, act_order: bool = False, v2: bool = False,
    g_idx: bool = True, dtype: torch.dtype = torch.float16, kept: tuple[str, ...] = ("lm_head",),
) -> Recipe:  # fmt: skip
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if v2 else {}

    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        q = quantize(weight, bits, group_size, symmetric=symmetric, act_order=act_order, dtype=dtype)
        if not v2:  # it stores zero - 1, which zero 0 doesn't have
            q = Codes(q.codes, [[max(zero, 1) for zero in row] for row in q.zeros], q.scales, q.groups)
        return gptq_tensors(q, bits, v2=v2, dtype=dtype, g_idx=g_idx), q.dense()

    return Recipe(config, make, kept)


def awq(group_size: int = 32, *, dtype: torch.dtype = torch.float16, kept: tuple[str, ...] = ("lm_head",)) -> Recipe:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}

    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        q = quantize(weight, 4, group_size, symmetric=False, dtype=dtype)
        return awq_tensors(q, dtype), q.dense()

    return Recipe(config | {"modules_to_not_convert": list(kept)}, make, kept)


def _compressed(form: str, weights: dict[str, Any], kept: tuple[str, ...]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": list(kept), "kv_cache_scheme": None}


def pack_quantized(
    bits: int = 4, group_size: int = 32, *, symmetric: bool = True, act_order: bool = False,
    dtype: torch.dtype = torch.bfloat16, kept: tuple[str, ...] = ("lm_head",),
) -> Recipe:  # fmt: skip
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights |= {"actorder": "group"} if act_order else {}

    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        q = quantize(weight, bits, group_size, symmetric=symmetric, act_order=act_order, dtype=dtype)
        tensors = {
            "weight_packed": packed(iter(q.codes), bits),
            "weight_scale": q.scales.to(dtype),
            "weight_shape": torch.tensor(weight.shape),
        }
        tensors |= {} if symmetric else {"weight_zero_point": packed(iter(columns_of(q.zeros)), bits).T.contiguous()}
        return tensors | ({"weight_g_idx": torch.tensor(q.groups).int()} if act_order else {}), q.dense()

    return Recipe(_compressed("pack-quantized", weights, kept), make, kept)


def fp8(*, by_row: bool, dtype: torch.dtype = torch.bfloat16, kept: tuple[str, ...] = ("lm_head",)) -> Recipe:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    weights["strategy"] = "channel" if by_row else "tensor"

    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        largest = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max().reshape(1)
        scale = (largest / 448).to(dtype)
        numbers = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale.float()

    config = _compressed("float-quantized", weights, kept)
    group = config["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return Recipe(config, make, kept)


def fp8_blocks(
    size: tuple[int, int] | None, *, dtype: torch.dtype = torch.float32, kept: tuple[str, ...] = ("lm_head",)
) -> Recipe:
    """As DeepSeek-V3 has it; without a size one scale for the matrix."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if size is not None:
        config |= {"weight_block_size": list(size)}

    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        height, width = size or (rows, columns)
        scales, numbers = torch.zeros(-(-rows // height), -(-columns // width), dtype=dtype), torch.zeros_like(weight)
        dense = torch.zeros_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                scales[i, j] = weight[block].abs().max() / 448
                scale = scales[i, j].float()
                numbers[block] = (weight[block] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
                dense[block] = numbers[block] * scale
        stored = {"weight": numbers.to(torch.float8_e4m3fn)}
        return stored | (
            {"weight_scale": scales[0, 0].clone()} if size is None else {"weight_scale_inv": scales}
        ), dense

    return Recipe(config, make, kept)


def quantized_copy(model: Path, directory: Path, recipe: Recipe) -> tuple[Path, Path]:
    """The dense `model` quantized, and dense again: directories "quantized" and "dense" (float32) in `directory`."""
    made = tuple(directory / name for name in ("quantized", "dense"))
    stored, dense = load_file(model / "model.safetensors"), {}
    for name, tensor in list(stored.items()):
        module, _, kind = name.rpartition(".")
        dense[name] = tensor.float()
        if kind != "weight" or tensor.dim() != 2 or "embed" in name or any(each in name for each in recipe.kept):
            continue
        tensors, dense[name] = recipe.make(tensor.float())
        del stored[name]
        stored |= {f"{module}.{suffix}": value for suffix, value in tensors.items()}
    config = json.loads((model / "config.json").read_text())
    for path, tensors, more in zip(made, (stored, dense), ({"quantization_config": recipe.config}, {}), strict=True):
        shutil.copytree(model, path)
        (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"} | more))
        save_file(tensors, path / "model.safetensors")
    return made[0], made[1]
