"""Weights: mapped and shared, sharded, converted once, digested, and refused with the name of what is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cache_dir import default_cache_dir
from engine.errors import ModelError
from engine.kernel_set import load_kernel_set
from engine.model_config import load_model_config
from engine.models.registry import load_model
from engine.safetensors_file import find_tensors
from engine.weights import open_weights
from engine.weights_digest import weights_digest
from tests.tiny_models import make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "model", num_hidden_layers=1)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(path: Path, cache: Path, dtype: str = "auto") -> dict[str, torch.Tensor]:
    """Every tensor of the directory, in the compute dtype, under its stored name."""
    config = load_model_config(path, dtype=dtype)
    weights = open_weights(path, config.dtype, cache_dir=cache)
    prefix = "model."
    names = find_tensors(path)
    return {
        name: weights.take(name.removeprefix(prefix), entry.shape)
        for name, entry in names.items()
        if name.startswith(prefix)
    }


def shard(path: Path) -> None:
    """Spread the tensors over three files with an index, and remove the single file."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        part = {name: tensor for i, (name, tensor) in enumerate(sorted(tensors.items())) if i % 3 == number}
        save_file(part, path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def resave(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({n: t for n, t in (tensors | change).items() if t is not None}, path / "model.safetensors")


def test_tensors_are_views_of_the_mapped_file(model: Path, cache: Path) -> None:
    tensors = load(model, cache)
    expected = load_file(model / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert not (cache / "weights").exists()
    with open("/proc/self/maps") as maps:
        mapped = [line.split("-")[0:2] for line in maps if str(model / "model.safetensors") in line]
    ranges = [(int(begin, 16), int(rest.split()[0], 16)) for begin, rest in mapped]
    assert all(any(b <= tensor.data_ptr() < e for b, e in ranges) for tensor in tensors.values())


def test_a_sharded_model_is_the_same_model(model: Path, cache: Path) -> None:
    expected, digest = load(model, cache), weights_digest(model, cache_dir=cache)
    shard(model)
    tensors = load(model, cache)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert weights_digest(model, cache_dir=cache) == digest


def test_the_digest_depends_on_every_byte_name_and_shape(model: Path, cache: Path) -> None:
    digests = {weights_digest(model, cache_dir=cache)}
    norm = load_file(model / "model.safetensors")["model.norm.weight"]
    nudged = norm.clone()
    nudged[-1] += 1e-6
    for change in (
        {"model.norm.weight": nudged},
        {"model.norm.weight": norm.view(8, 8)},
        {"model.norm.weight": None, "model.other.weight": norm},
    ):
        copy = model.parent / f"copy{len(digests)}"
        shutil.copytree(model, copy)
        resave(copy, change)
        digests.add(weights_digest(copy, cache_dir=cache))
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}


def test_a_known_file_is_not_read_again(model: Path, cache: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = weights_digest(model, progress=lambda done, total: calls.append((done, total)), cache_dir=cache)
    total = sum(t.nbytes for t in load_file(model / "model.safetensors").values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    calls.clear()
    assert weights_digest(model, progress=lambda done, total: calls.append((done, total)), cache_dir=cache) == first
    assert calls == []
    resave(model, {"model.norm.weight": torch.zeros(64)})  # same size, other content and time
    assert weights_digest(model, cache_dir=cache) != first


def test_a_spoiled_or_unwritable_digest_cache_costs_only_time(model: Path, cache: Path) -> None:
    digest = weights_digest(model, cache_dir=cache)
    (entry,) = (cache / "digests").iterdir()
    entry.write_text("not hex")
    assert weights_digest(model, cache_dir=cache) == digest
    blocked = cache / "a file"
    blocked.write_text("")
    assert weights_digest(model, cache_dir=blocked) == digest


def test_another_dtype_is_converted_once_and_mapped(model: Path, cache: Path) -> None:
    calls: list[tuple[int, int]] = []
    config = load_model_config(model, dtype="bfloat16")
    kernels = load_kernel_set("torch")
    load_model(config, kernels, cache_dir=cache, progress=lambda done, total: calls.append((done, total)))
    expected = load_file(model / "model.safetensors")
    total = sum(t.numel() * 2 for t in expected.values())
    assert len(calls) > 5
    assert calls[-1] == (total, total)
    (converted,) = (cache / "weights").glob("*.safetensors")
    assert all(torch.equal(t, expected[name].bfloat16()) for name, t in load_file(converted).items())
    inode = converted.stat().st_ino
    tensors = load(model, cache, dtype="bfloat16")
    assert converted.stat().st_ino == inode
    assert all(torch.equal(t, expected[name].bfloat16()) for name, t in tensors.items())
    assert sorted(path.suffix for path in (cache / "weights").iterdir()) == [".lock", ".safetensors"]


def test_two_processes_that_convert_at_once_map_the_same_file(model: Path, cache: Path) -> None:
    code = (
        "import sys, torch, os\n"
        "from pathlib import Path\n"
        "from engine.weights import open_weights\n"
        "weights = open_weights(Path(sys.argv[1]), torch.bfloat16, cache_dir=Path(sys.argv[2]))\n"
        "weights.take('norm.weight', (64,))\n"
        "print({line.split()[4] for line in open('/proc/self/maps') if 'safetensors' in line})\n"
    )
    command = [sys.executable, "-c", code, str(model), str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    inodes = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert inodes[0] == inodes[1]
    assert str(next((cache / "weights").glob("*.safetensors")).stat().st_ino) in inodes[0]


def test_float16_is_exact_in_float32(tmp_path: Path, cache: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "half", dtype="float16")
    tensors = load(path, cache)
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert all(torch.equal(t, load_file(path / "model.safetensors")[n].float()) for n, t in tensors.items())


def test_tied_embeddings_exist_once(tmp_path: Path, cache: Path) -> None:
    tied = make_tiny_model("qwen3", tmp_path / "tied")
    model = load_model(load_model_config(tied), load_kernel_set("torch"), cache_dir=cache)
    assert model.head is model.embedding
    untied = make_tiny_model("llama", tmp_path / "untied")
    model = load_model(load_model_config(untied), load_kernel_set("torch"), cache_dir=cache)
    assert model.head is not model.embedding


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", "/somewhere")
    assert default_cache_dir() == Path("/somewhere")
    monkeypatch.delenv("PAGEWIRE_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "pagewire"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"tensor model\.norm\.weight \[64\] is missing"),
        ({"lm_head.weight": None}, r"tensor lm_head\.weight \[300, 64\] is missing"),
        ({"model.norm.weight": torch.zeros(63)}, r"model\.norm\.weight is \[63\]; the config asks for \[64\]"),
        ({"model.norm.weight": torch.zeros(64).long()}, r"model\.norm\.weight is I64; supported are F32, F16, BF16"),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)},
            r"1 tensors are not part of this architecture: model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        ({"model.embed_tokens.weight": None}, r"expected one tensor …embed_tokens\.weight, found \[\]"),
    ],
)
def test_tensors_that_do_not_fit(
    model: Path, cache: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    resave(model, change)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(load_model_config(model), load_kernel_set("torch"), cache_dir=cache)
    assert str(model) in str(caught.value)


def test_files_that_can_not_be_read(model: Path) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    for broken, message in [
        (b"", "not a safetensors file, or cut short"),
        (content[:6], "not a safetensors file, or cut short"),
        (content[:100], "not a safetensors file, or cut short"),
        (content[:-1], "is cut short or lies outside the file"),
        (b"\xff" * 5000, "not a safetensors file, or cut short"),
        (content[:8] + b"x" + content[9:], "header is not JSON"),
        (re.sub(rb'"dtype":"F32"', b'"dtype":"Q99"', content, count=1), "header that can't be used"),
    ]:
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=message) as caught:
            find_tensors(model)
        assert str(file) in str(caught.value)


def test_a_broken_index_is_named(model: Path) -> None:
    shard(model)
    index = model / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for broken, message in [
        ({}, "has no weight_map"),
        (weight_map | {"model.norm.weight": "../secret.safetensors"}, "must be a file name"),
        (weight_map | {"model.extra.weight": "model-1.safetensors"}, r"tensor model\.extra\.weight is not in model-1"),
        (weight_map | {"model.norm.weight": "model-9.safetensors"}, r"model-9\.safetensors: No such file"),
    ]:
        index.write_text(json.dumps({"weight_map": broken}))
        with pytest.raises(ModelError, match=message):
            find_tensors(model)


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file \(pytorch_model\.bin is pickled, which is never"):
        find_tensors(tmp_path)


def test_a_full_disk_is_reported(model: Path, tmp_path: Path) -> None:
    if os.path.exists("/dev/full"):
        blocked = tmp_path / "blocked"
        blocked.write_text("")
        with pytest.raises(ModelError, match=r"the converted weights \(\d+ bytes\) can't be written"):
            open_weights(model, torch.bfloat16, cache_dir=blocked)
