"""Parts of quantized matrices are parts of what they stand for, to the bit; ranks that have them give one's tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import quantization_name
from engine.errors import ModelError
from engine.gguf import packed_directory
from engine.model_config import load_model_config
from engine.models.registry import load_model
from engine.parallel.config import shard_config
from engine.parallel.shard import Cut
from engine.quantized.cut import cut_matrix
from kernels import cpu
from kernels.cpu.native import NativeKernels
from kernels.grouped import GroupedMatrix, KScales
from pagewire.config import engine_options
from tests.engine.gguf_files import write_gguf
from tests.engine.parallel.test_ranks import tokens
from tests.quantized_checkpoints import Recipe, awq, fp8, gptq, pack_quantized, quantized_copy

Tiny = Callable[..., Path]


def matrix(group_size: int, columns: int = 256, *, kind: str = "int4", apart: bool = False) -> GroupedMatrix:
    generator = torch.Generator().manual_seed(group_size)
    groups = -(-columns // group_size)
    numbers = torch.randint(-8, 8, (24, columns), generator=generator).char()
    return GroupedMatrix(
        "int4",
        numbers,
        torch.rand(24, groups, generator=generator) + 0.1,
        group_size,
        torch.randn(24, groups, generator=generator) if kind == "int4" else None,
        torch.randperm(columns, generator=generator) if apart else None,
    )


@pytest.mark.parametrize(
    ("group_size", "columns", "size", "expected"),
    [
        (32, 256, 4, 32),
        (128, 256, 2, 128),
        (128, 384, 2, 64),
        (128, 256, 8, 32),
        (256, 512, 4, 128),
        (256, 256, 2, 128),
        (320, 320, 2, 160),
        (128, 320, 2, 32),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_columns_are_cut_where_groups_can_be(
    group_size: int, columns: int, size: int, expected: int, apart: bool
) -> None:
    """Larger groups are made of smaller ones with the same scale; one for a whole row is cut anywhere."""
    if apart and group_size >= columns:
        pytest.skip("one group has all columns")
    whole = matrix(group_size, columns, apart=apart)
    each = columns // size
    cuts = [Cut((24, columns), 1, (range(rank * each, (rank + 1) * each),)) for rank in range(size)]
    parts = [cut_matrix(whole, cut, "o_proj") for cut in cuts]
    dense = [part.dequantized() for part in parts]
    if apart:  # each has its columns in their places and zeros in the others'
        assert torch.equal(torch.stack(dense).sum(0), whole.dequantized())
    else:
        assert torch.equal(torch.cat(dense, 1), whole.dequantized())
    assert max(part.group_size for part in parts) == expected
    assert all(part.numbers.shape == (24, each) and part.numbers.is_contiguous() for part in parts)


def test_rows_are_cut_anywhere() -> None:
    whole = matrix(32)
    cut = Cut((24, 256), 0, (range(3, 8), range(15, 16)))
    assert torch.equal(cut_matrix(whole, cut, "qkv_proj").dequantized(), cut.of(whole.dequantized()))
    assert cut_matrix(whole, Cut((24, 256)), "gate") is whole


@pytest.mark.parametrize("with_mins", [False, True])
def test_k_types_are_cut_between_their_blocks(with_mins: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def upper() -> torch.Tensor:
        return torch.rand(6, 4, generator=generator).half()

    def lower() -> torch.Tensor:
        width = 32 if with_mins else 16
        return torch.randint(
            0, 60, (6, 1024 // width), generator=generator, dtype=torch.uint8 if with_mins else torch.int8
        )

    levels = KScales(upper(), lower(), upper(), lower()) if with_mins else KScales(upper(), lower())
    numbers = torch.randint(0, 16, (6, 1024), generator=generator).char()
    whole = GroupedMatrix.of_levels("uint4" if with_mins else "int6", numbers, levels)
    cuts = [Cut((6, 1024), 1, (range(512),)), Cut((6, 1024), 1, (range(512, 1024),))]
    for cut in (*cuts, Cut((6, 1024), 0, (range(1, 3), range(5, 6)))):
        part = cut_matrix(whole, cut, "o_proj")
        assert torch.equal(part.dequantized(), cut.of(whole.dequantized()))
        assert part.levels is not None
        assert torch.equal(part.levels.scales(), part.scales)
    with pytest.raises(
        ValueError, match=r"1024 columns in blocks of 256 can't be shared out by 8 ranks: .* 128 to 255"
    ):
        cut_matrix(whole, Cut((6, 1024), 1, (range(128, 256),)), "o_proj")


def test_what_can_not_be_cut_is_refused_with_the_numbers() -> None:
    half = Cut((24, 112), 1, (range(56),))
    with pytest.raises(
        ValueError, match=r"112 columns in groups of 32 can't be shared out by 2 ranks: .* columns 0 to 55"
    ):
        cut_matrix(matrix(32, 112), half, "layers.0.mlp.down_proj")
    half = Cut((24, 256), 1, (range(128),))
    with pytest.raises(ValueError, match=r"act-order.: experts with such can't be shared out by 2 ranks"):
        cut_matrix(matrix(64, apart=True), half, "layers.0.mlp.experts.1.down_proj")


def test_the_layer_that_can_not_be_cut_is_named(tiny_model: Tiny, tmp_path: Path) -> None:
    model, _ = quantized_copy(tiny_model("llama", num_hidden_layers=1), tmp_path, gptq(group_size=32))
    if not cpu.available():
        pytest.skip(cpu.why_unavailable())
    config = shard_config(load_model_config(str(model), dtype="float32"), 1, 2)
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.down_proj: its 112 columns in groups of 32"):
        load_model(config, NativeKernels(cpu.load(), None))


def test_block_keys_are_those_of_one_process(tiny_model: Tiny, tmp_path: Path) -> None:
    """The weights are the same; those that ranks quantize themselves are not."""
    model, _ = quantized_copy(tiny_model("llama", num_hidden_layers=1), tmp_path, gptq(group_size=32))
    for path, quantization, expected in ((model, "none", "gptq4g32"), (tiny_model("llama"), "int8", "int8/tp2")):
        options = engine_options(model=str(path), tensor_parallel_size=2, quantization=quantization)
        assert quantization_name(options, load_model_config(str(path), dtype="float32")) == expected


WIDE = {"intermediate_size": 128, "num_hidden_layers": 2}
RECIPES = [
    pytest.param(gptq(group_size=64, act_order=True), "native"),
    *(
        pytest.param(recipe, kernels, marks=pytest.mark.nightly)
        for recipe in (
            gptq(group_size=64, act_order=True), gptq(8, 32), gptq(group_size=-1, act_order=True), awq(32), awq(128),
            pack_quantized(4, 32, symmetric=False, act_order=True), pack_quantized(8, -1), fp8(by_row=True),
            fp8(by_row=False),
        )
        for kernels in ("native", "torch")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "kernels"), RECIPES)
def test_the_tokens_are_those_of_one_process(tiny_model: Tiny, tmp_path: Path, recipe: Recipe, kernels: str) -> None:
    model, _ = quantized_copy(tiny_model("llama", **WIDE), tmp_path, recipe)
    check(model, kernels)


@pytest.mark.nightly
@pytest.mark.parametrize("stored", ["Q4_0", "Q8_0"])
def test_a_gguf_file_is_shared_out_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    from gguf import GGMLQuantizationType

    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    _, file = write_gguf("llama", tmp_path, quantization=GGMLQuantizationType[stored], **WIDE)
    check(packed_directory(file, dtype="float32"), "native")


def check(model: Path, kernels: str, **options: Any) -> None:
    if kernels == "native" and not cpu.available():
        pytest.skip(cpu.why_unavailable())
    assert tokens(model, kernels=kernels, tensor_parallel_size=2, **options) == tokens(
        model, kernels=kernels, **options
    )
