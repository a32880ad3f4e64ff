"""GGUF conversion inverts llama.cpp's, for every family, and refuses what it can't convert by name."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file as load_torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from engine.atomic_dir import atomic_directory
from engine.gguf import ConvertError, convert_gguf
from engine.gguf_reader import GgufFile
from tests.engine.gguf_files import gguf_tensor, write_gguf
from tests.tiny_models import FAMILIES

TEXTS = (
    "The cat sat on the other mat.",
    "  two  spaces\n\n\ttab",
    "naïve 中文 🚀👩‍👩‍👧 \x00\x7f",
    "",
    "<eos> <start_of_turn>x",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_gives_the_original_model_back(family: str, tmp_path: Path) -> None:
    original, path = write_gguf(family, tmp_path)
    out = convert_gguf(path, tmp_path / "out", dtype="float32")
    wanted, found = load_numpy(original / "model.safetensors"), load_numpy(out / "model.safetensors")
    assert set(found) == set(wanted)  # tied embeddings exist once
    for name, value in wanted.items():
        # Gemma's norm weights go through w + 1 - 1.
        tolerance = 2e-7 if family == "gemma3" and name.endswith("norm.weight") else 0.0
        assert np.abs(found[name] - value).max() <= tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    overrides = {"query_pre_attn_scalar": 16} if family == "gemma3" else {}  # not in GGUF: it is the head size
    original, path = write_gguf(family, tmp_path, **overrides)
    out = convert_gguf(path, tmp_path / "out", dtype="float32")
    ids = torch.arange(5, 50)[None]
    logits = []
    for directory in (original, out):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    assert logits[0].std() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_config_equals_the_originals(family: str, tmp_path: Path) -> None:
    original, path = write_gguf(family, tmp_path)
    out = convert_gguf(path, tmp_path / "out", dtype="float32")
    wanted, found = AutoConfig.from_pretrained(original).to_dict(), AutoConfig.from_pretrained(out).to_dict()
    if family == "gemma3":  # not in GGUF: it is the head size
        assert (found.pop("query_pre_attn_scalar"), wanted.pop("query_pre_attn_scalar")) == (16, 24)
    for name in ("_name_or_path", "head_dim"):  # written out where the original leaves it to its default
        found.pop(name, None)
        wanted.pop(name, None)
    assert found == wanted


def test_tokenizer_template_and_end_tokens_come_along(tmp_path: Path) -> None:
    original, path = write_gguf("llama", tmp_path)
    out = convert_gguf(path, tmp_path / "out")
    wanted = Tokenizer.from_file(str(original / "tokenizer.json"))
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == wanted.encode(text).ids
        assert ids[0] == found.token_to_id("<bos>")
        assert found.decode(ids, skip_special_tokens=False) == wanted.decode(ids, skip_special_tokens=False)
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["chat_template"] == json.loads((original / "tokenizer_config.json").read_text())["chat_template"]
    assert (config["bos_token"], config["add_bos_token"]) == ("<bos>", True)
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [found.token_to_id("<eos>"), found.token_to_id("<end_of_turn>")]


def test_bfloat16_rounds_to_nearest_even(tmp_path: Path) -> None:
    original, path = write_gguf("qwen2", tmp_path)
    out = convert_gguf(path, tmp_path / "out")
    found = load_torch(out / "model.safetensors")
    for name, value in load_torch(original / "model.safetensors").items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], value.to(torch.bfloat16)), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.F16])
def test_quantized_weights_are_expanded(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    original, path = write_gguf("llama", tmp_path, quantization=kind)
    out = convert_gguf(path, tmp_path / "out", dtype="float32")
    config = json.loads((original / "config.json").read_text())
    found = load_numpy(out / "model.safetensors")
    for name, value in load_numpy(original / "model.safetensors").items():
        if value.ndim == 2 and value.shape[1] % 32 == 0:
            _, stored = gguf_tensor(name, value, config)
            _, back = gguf_tensor(name, found[name], config)
            assert np.array_equal(back, dequantize(quantize(stored, kind), kind)), name


def test_gemma3_knows_its_pattern_and_the_size_with_another_scale(tmp_path: Path) -> None:
    _, path = write_gguf("gemma3", tmp_path, extra={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    config = AutoConfig.from_pretrained(convert_gguf(path, tmp_path / "out"))
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """As in Meta's reference code."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (index / head_dim)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_scaling_is_recognized(tmp_path: Path) -> None:
    divisors = _llama3_divisors(16, 500000.0, 32.0)
    _, path = write_gguf("llama", tmp_path, tensors={"rope_freqs.weight": divisors}, rope_theta=500000.0)
    rope = AutoConfig.from_pretrained(convert_gguf(path, tmp_path / "out")).rope_parameters
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_progress_runs_from_nothing_to_all(tmp_path: Path) -> None:
    _, path = write_gguf("qwen3", tmp_path)
    seen: list[tuple[str, int, int]] = []
    out = convert_gguf(path, tmp_path / "out", progress=lambda *args: seen.append(args))
    weights = [done for stage, done, _ in seen if stage == "weights"]
    assert weights == sorted(weights)
    assert weights[-1] == seen[-1][2]
    assert 0 < (out / "model.safetensors").stat().st_size - weights[-1] < 20_000  # the rest is the header


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drop": ("blk.1.attn_q.weight",)}, "model.layers.1.self_attn.q_proj.weight: tensor is missing"),
        ({"drop": ("token_embd.weight",)}, "token_embd.weight: tensor is missing"),
        (
            {"tensors": {"blk.0.mystery.weight": np.zeros((2, 2), np.float32)}},
            "blk.0.mystery.weight: tensor is not part of the architecture 'llama'",
        ),
        (
            {"tensors": {"blk.0.attn_q.weight": np.zeros((8, 64), np.float32)}},
            "blk.0.attn_q.weight: shape [8, 64] where the metadata asks for [64, 64]",
        ),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32) * 3}}, "rope_freqs.weight: these frequencies"),
        ({"extra": {"expert_count": 8}}, "llama.expert_count: mixture-of-experts models are not supported"),
        ({"extra": {"rope.dimension_count": 8}}, "llama.rope.dimension_count: must equal the head size 16"),
        ({"extra": {"rope.scaling.type": "magic", "rope.scaling.factor": 2.0}}, "'magic' is not supported"),
    ],
)
def test_what_can_not_be_converted_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, path = write_gguf("llama", tmp_path, **fields)
    with pytest.raises(ConvertError) as caught:
        convert_gguf(path, tmp_path / "out")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.gguf", "original"]


def _patched(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) >= 1
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_unknown_architecture_and_quantization_are_named(tmp_path: Path) -> None:
    _, path = write_gguf("llama", tmp_path)
    _patched(path, b"llama", b"mamba")
    with pytest.raises(ConvertError, match=r"general.architecture: 'mamba' is not supported; supported are gemma3"):
        convert_gguf(path, tmp_path / "out")
    with pytest.raises(ConvertError, match="dtype: 'int3' is not supported"):
        convert_gguf(path, tmp_path / "out", dtype="int3")


def test_a_quantization_without_a_way_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = write_gguf("llama", tmp_path, quantization=GGMLQuantizationType.Q8_0)
    monkeypatch.setattr("gguf.quants._type_traits", {})
    with pytest.raises(ConvertError, match=r"weight: quantization Q8_0 can't be dequantized"):
        convert_gguf(path, tmp_path / "out")


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    for name in ("text", "empty"):
        with pytest.raises(ConvertError, match=f"{name}: not a GGUF file"):
            convert_gguf(tmp_path / name, tmp_path / "out")
    with pytest.raises(ConvertError, match="missing: can't be read: No such file"):
        convert_gguf(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ConvertError, match="can't be read: Is a directory"):
        convert_gguf(tmp_path, tmp_path / "out")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("small")
    _, path = write_gguf("llama", directory, num_hidden_layers=1)
    return path.read_bytes()


def test_a_file_cut_anywhere_is_refused(small_file: bytes, tmp_path: Path) -> None:
    cuts = [4, 5, 12, 23, 24, 30, 100, 1000, 3000, 6000, len(small_file) // 2, len(small_file) - 65]
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(small_file[:cut])
        with pytest.raises(ConvertError, match=r"cut\.gguf: truncated or damaged GGUF file"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")


@settings(max_examples=150, deadline=None)
@given(where=st.integers(4, 12_000), what=st.binary(min_size=1, max_size=8))
def test_a_damaged_header_never_gives_anything_but_a_convert_error(
    where: int, what: bytes, small_file: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    data = bytearray(small_file)
    data[where : where + len(what)] = what
    (directory / "model.gguf").write_bytes(data)
    try:
        out = convert_gguf(directory / "model.gguf", directory / "out")
    except ConvertError:
        assert not (directory / "out").exists()
    else:
        assert (out / "model.safetensors").is_file()


def test_an_existing_directory_is_never_touched(tmp_path: Path) -> None:
    _, path = write_gguf("llama", tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConvertError, match="out: exists already"):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["mine"]


KILLED = """
import sys, time
from pathlib import Path
from engine.gguf import convert_gguf
def stop(stage, done, total):
    if stage == "weights":
        print("writing", flush=True)
        time.sleep(60)
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), progress=stop)
"""


def test_a_killed_conversion_leaves_no_directory_and_the_next_one_works(tmp_path: Path) -> None:
    _, path = write_gguf("llama", tmp_path)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(out)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"writing\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not out.exists()
    assert (tmp_path / ".out.partial").is_dir()
    convert_gguf(path, out)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.gguf", "original", "out"]
    assert "model.safetensors" in {entry.name for entry in out.iterdir()}


def test_of_two_makers_of_a_directory_one_waits_for_the_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found: list[Path | None] = []

    def second() -> None:
        with atomic_directory(out) as directory:
            found.append(directory)

    with atomic_directory(out) as directory:
        assert directory is not None
        waiter = threading.Thread(target=second)
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        (directory / "file").write_text("whole")
    waiter.join()
    assert found == [None]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (out / "file").read_text() == "whole"


def test_numbers_come_back_as_they_were_written(tmp_path: Path) -> None:
    _, path = write_gguf("llama", tmp_path)
    file = GgufFile(path)
    assert file.number("llama.attention.layer_norm_rms_epsilon") == 1e-6
    with pytest.raises(ConvertError, match=r"no\.such\.key: missing"):
        file.integer("no.such.key")
    with pytest.raises(ConvertError, match="is not a string"):
        file.string("llama.block_count")
