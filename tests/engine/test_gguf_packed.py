"""GGUF files served as they are: the common types stay packed, number by number; all else is what converting gives."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors.torch import load_file

from engine import gguf_weights
from engine.gguf import ConvertError, convert_gguf, packed_directory
from engine.gguf_blocks import kinds
from engine.gguf_description import described_directory
from engine.kernel_set import load_kernel_set
from engine.model_config import load_model_config
from engine.models.registry import load_model
from engine.quantized.gguf import TYPES
from engine.weights import map_weights
from engine.weights_digest import weights_digest
from kernels import cpu
from kernels.grouped import GroupedMatrix
from pagewire.cli.model import resolve_model
from tests.engine.gguf_files import K_SCALES, random_blocks, write_gguf
from tests.engine.model_harness import TinyModel, hugging_face, random_prompt

Q4_0, Q8_0, Q5_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0
Q4_K, Q5_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K
Q4_1 = GGMLQuantizationType.Q4_1
KINDS = {Q4_0: "int4", Q5_0: "int5", Q8_0: "int8", Q4_K: "uint4", Q5_K: "uint5", Q6_K: "int6"}
KERNELS = ("torch", "native") if cpu.available() else ("torch",)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("family", "stored", "seed"),
    [
        ("llama", Q4_0, 1),
        ("gemma3", Q8_0, 1),
        ("qwen2", Q5_0, 2),
        ("llama", Q4_K, 1),
        ("gemma3", Q5_K, 1),
        ("qwen2", Q6_K, 1),
    ],
    ids=str,
)
def test_numbers_and_tokens_are_those_of_the_expanded_file(
    tmp_path: Path, family: str, stored: GGMLQuantizationType, seed: int
) -> None:
    """To the bit, rows in Hugging Face's order; the tied embedding too. The oracle of the numbers is `gguf`'s."""
    fields = {"query_pre_attn_scalar": 16} if family == "gemma3" else {}  # not in GGUF: it is the head size
    sizes = {"intermediate_size": 96}
    if stored in K_SCALES:
        sizes = {"intermediate_size": 256, "hidden_size": 256, "num_attention_heads": 16, "head_dim": 16}
    _, file = write_gguf(family, tmp_path, quantization=stored, seed=seed, **sizes, **fields)
    expanded = convert_gguf(file, tmp_path / "expanded", dtype="float32")
    path = packed_directory(file, dtype="float32")
    config = load_model_config(path)
    assert config.quantization_label == "gguf"
    weights = map_weights(path, torch.float32, config.quantization)
    for name, expected in load_file(expanded / "model.safetensors").items():
        module = name.removeprefix("model.").removesuffix(".weight")
        if expected.dim() == 2:
            found = weights.matrix(module, (expected.shape[0], expected.shape[1]))
            assert isinstance(found, GroupedMatrix)
            assert found.kind == KINDS[stored]
            assert torch.equal(found.dequantized(), expected), name
        else:
            assert torch.equal(weights.take(name.removeprefix("model."), tuple(expected.shape)), expected), name
    prompt = random_prompt(15, seed=seed)
    output = hugging_face(expanded).generate(prompt[None], max_new_tokens=12, do_sample=False)[0, 15:].tolist()
    for kernels in KERNELS:
        run = TinyModel(path, kernels=kernels, max_tokens=40, num_sequences=1)
        assert run.greedy(prompt, 12, chunk=6) == output, kernels


def test_what_is_over_one_input_stays_packed_all_or_none() -> None:
    """Gate and up as numbers of one kind."""
    layer = "model.layers.3."
    names = [f"{layer}self_attn.{part}_proj.weight" for part in "qkv"]
    mlp = [f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert kinds(dict.fromkeys([*names, *mlp], Q4_0)) == dict.fromkeys([*names, *mlp], "int4")
    found = kinds(dict.fromkeys(names, Q4_0) | {names[2]: Q8_0, mlp[0]: Q4_0, mlp[1]: Q4_1, mlp[2]: Q8_0})
    assert found == dict.fromkeys(names, "int4") | {names[2]: "int8", mlp[2]: "int8"}
    found = kinds(dict.fromkeys(names, Q4_K) | {names[2]: Q6_K, mlp[2]: Q6_K})
    assert found == dict.fromkeys(names, "uint4") | {names[2]: "int6", mlp[2]: "int6"}
    assert kinds(dict.fromkeys(names, Q5_0) | {names[2]: Q4_1}) == {}
    assert kinds({mlp[0]: Q4_0, mlp[1]: Q8_0}) == dict.fromkeys(mlp[:2], "int8")
    assert kinds({mlp[0]: Q5_K, mlp[1]: Q4_K}) == {}


@pytest.mark.parametrize("number", list(TYPES))
def test_every_code_is_what_gguf_reads(number: int) -> None:
    kind = TYPES[number]
    blocks = random_blocks(GGMLQuantizationType(number), 5, 768)
    read = kind.read(torch.from_numpy(blocks).view(5, -1, kind.bytes))
    assert torch.equal(read.dequantized(), torch.from_numpy(dequantize(blocks, GGMLQuantizationType(number))))


def test_four_bits_beside_eight_are_the_same_numbers(tmp_path: Path) -> None:
    """Of a file whose up is Q8_0 gate is read as eight bits; v is by itself; a mapped file gives the same bits."""
    other = {".attn_v.": Q8_0, ".ffn_up.": Q8_0}
    _, file = write_gguf("llama", tmp_path, quantization=Q4_0, kinds=other, num_hidden_layers=1)
    expanded_path = convert_gguf(file, tmp_path / "expanded", dtype="float32")
    expanded = load_file(expanded_path / "model.safetensors")
    path = packed_directory(file, dtype="float32")
    weights = map_weights(path, torch.float32, load_model_config(path).quantization)
    expected = {f"self_attn.{part}_proj": "int4" for part in "qk"} | {"self_attn.v_proj": "int8"}
    expected |= {f"mlp.{part}_proj": "int8" for part in ("gate", "up")}
    for part, kind in expected.items():
        name = f"layers.0.{part}"
        dense = expanded[f"model.{name}.weight"]
        found = weights.matrix(name, (dense.shape[0], dense.shape[1]))
        assert isinstance(found, GroupedMatrix)
        assert found.kind == kind
        assert torch.equal(found.dequantized(), dense)
    prompt = random_prompt(15, seed=1)
    runs = [TinyModel(each, kernels=KERNELS[-1], max_tokens=40, num_sequences=5) for each in (path, expanded_path)]
    assert runs[0].greedy(prompt, 12, chunk=6) == runs[1].greedy(prompt, 12, chunk=6)
    if cpu.available():
        digest, bits = weights_digest(path), runs[0].logits(prompt)
        for _ in range(2):  # written, then mapped
            kernels = load_kernel_set("native")
            runs[0].model = load_model(runs[0].config, kernels, cache_dir=tmp_path / "cache", digest=digest)
            assert torch.equal(runs[0].logits(prompt), bits)


@pytest.mark.parametrize("kinds_of", [{}, {".attn_v.": Q8_0}], ids=["four bits", "and eight"])
def test_large_matrices_go_by_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds_of: dict[str, GGMLQuantizationType]
) -> None:
    """Rows that change places too: the file is the same."""
    _, file = write_gguf("llama", tmp_path, quantization=Q4_0, kinds=kinds_of, num_hidden_layers=1)
    path = packed_directory(file, dtype="float32")
    whole = (path / "model.safetensors").read_bytes()
    shutil.rmtree(path)
    monkeypatch.setattr(gguf_weights, "_PIECE_ELEMENTS", 5 * 64)
    done = [0]
    packed_directory(file, dtype="float32", progress=lambda stage, at, total: done.append(at * (stage == "weights")))
    assert (path / "model.safetensors").read_bytes() == whole
    assert max(end - start for start, end in pairwise(done)) <= 4 * 5 * 64


def test_other_types_are_expanded(tmp_path: Path) -> None:
    _, file = write_gguf("llama", tmp_path, quantization=Q4_1)
    path = resolve_model(str(file))
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    expanded = convert_gguf(file, tmp_path / "expanded")
    found, expected = (load_file(directory / "model.safetensors") for directory in (path, expanded))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_file_is_prepared_once_for_each_content(tmp_path: Path) -> None:
    _, file = write_gguf("llama", tmp_path, quantization=Q8_0, num_hidden_layers=1)
    path = packed_directory(file, dtype="auto")
    made = (path / "model.safetensors").stat().st_ino
    assert packed_directory(file, dtype="bfloat16") == path
    assert (path / "model.safetensors").stat().st_ino == made
    assert packed_directory(file, dtype="float32") != path
    with pytest.raises(ConvertError, match=r"nowhere.gguf: No such file"):
        packed_directory(tmp_path / "nowhere.gguf", dtype="auto")


def test_earlier_contents_of_a_file_are_deleted(tmp_path: Path) -> None:
    """For every purpose; other files' directories stay, of the same name too."""
    _, file = write_gguf("llama", tmp_path, quantization=Q8_0, num_hidden_layers=1)
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    shutil.copy(file, other)
    kept = packed_directory(other, dtype="auto")
    old = [packed_directory(file, dtype="auto"), packed_directory(file, dtype="float32"), described_directory(file)]
    assert all(each.is_dir() for each in old)
    half_deleted = old[0].with_name(f".{old[0].name}.old")
    shutil.copytree(old[0], half_deleted)
    os.utime(file, ns=(1, 1))
    new = {described_directory(file), packed_directory(file, dtype="auto")}
    assert set(kept.parent.iterdir()) == {kept, *new}
