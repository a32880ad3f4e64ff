"""int8 weights in the engine: the reference's numbers, the same tokens in any company, own files and own classes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.errors import ModelError
from engine.kernel_set import load_kernel_set
from engine.models.registry import load_model
from engine.weights_digest import weights_digest
from kernels import cpu
from kernels.int8 import Quantization
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import TinyModel, random_prompt

NATIVE = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())
MODES: tuple[Quantization, ...] = ("int8", "w8a8")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    yield tmp_path
    if cpu.available():
        cpu.load().configure_threads(1)


def logits(path: Path, kernels: str, quantization: Quantization | None, cache: Path | None = None) -> torch.Tensor:
    run = TinyModel(path, kernels=kernels, max_tokens=40, num_sequences=1)
    digest = None if cache is None else weights_digest(path, cache_dir=cache)
    kernel_set = load_kernel_set(kernels, quantization=quantization)
    run.model = load_model(run.config, kernel_set, cache_dir=cache, digest=digest)
    return run.logits(random_prompt(33, seed=1))


def packed_files(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "packed").iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_sets_agree(tiny_model: Callable[..., Path], cache: Path, family: str) -> None:
    """Closely where products are of numbers. Where they are of integers, a number near the middle of two may be rounded
    the other way, which is far less than what quantizing changes."""
    path = tiny_model(family, seed=1, dtype="float32")
    exact = logits(path, "reference", None)
    for quantization in MODES:
        expected = logits(path, "reference", quantization)
        change = (expected - exact).abs().max()
        assert 1e-4 < change / exact.abs().max() < 0.1, quantization
        sets = ("torch", "native") if cpu.available() else ("torch",)
        for kernels in sets:
            error = (logits(path, kernels, quantization, cache) - expected).abs().max()
            assert error < (0.002 if quantization == "int8" else 0.3) * change, (kernels, quantization)


def options(path: Path, **fields: Any) -> EngineOptions:
    common = {"dtype": "bfloat16", "block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 64, "cpu_threads": 1}
    return EngineOptions(model=str(path), **(common | fields))


@NATIVE
@pytest.mark.parametrize("quantization", MODES)
def test_the_same_tokens_in_any_company(
    tiny_model: Callable[..., Path], cache: Path, quantization: Quantization
) -> None:
    """Alone, batched, chunked, on other threads, with drafts, from a mapped file; both dtypes, tied and not."""
    prompts = [random_prompt(length, seed=length).tolist() for length in (1, 7, 40)]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    for family, dtype in (("gemma3", "bfloat16"), ("qwen2", "float32"), ("llama", "bfloat16")):
        outputs = []
        for more in ({}, {"cpu_threads": 2}, {"speculative_config": drafts}, {"max_num_batched_tokens": 5}):
            path = tiny_model(family, seed=1)
            engine = Engine(options(path, kernels="native", dtype=dtype, quantization=quantization, **more))
            assert engine.numerics_class == f"{dtype}+{quantization}/native/{cpu.load().isa}/tp1"
            outputs.append(engine.generate(prompts, params))
            if not more:
                outputs.append([engine.generate([prompt], params)[0] for prompt in prompts])
            engine.close()
        assert outputs[1:] == outputs[:1] * 4, (family, dtype)


@NATIVE
def test_each_quantization_has_its_file_of_half_the_size(tiny_model: Callable[..., Path], cache: Path) -> None:
    path = tiny_model("gemma3", seed=1, dtype="bfloat16", hidden_size=256, intermediate_size=512, vocab_size=2048)
    found = {quantization: logits(path, "native", quantization, cache) for quantization in (None, *MODES)}
    sizes = {file.name.split("tiles-1")[1]: file.stat().st_size for file in packed_files(cache)}
    assert sizes.keys() == {"", "-int8", "-w8a8"}
    assert sizes["-int8"] == sizes["-w8a8"] < 0.6 * sizes[""]
    for quantization, expected in found.items():  # mapped this time
        assert torch.equal(logits(path, "native", quantization, cache), expected)
        assert torch.equal(logits(path, "native", quantization), expected)  # packed into private memory
    assert len(packed_files(cache)) == 3


@NATIVE
def test_a_tied_embedding_exists_once(tiny_model: Callable[..., Path]) -> None:
    run = TinyModel(tiny_model("gemma3", seed=1), kernels="native")
    model = load_model(run.config, load_kernel_set("native", quantization="int8"))
    assert model.head is model.embedding
    assert model.head.data.numel() == -(-run.config.vocab_size // 32) * 32 * -(-run.config.hidden_size // 64) * 64


def test_kv_of_other_quantizations_is_foreign(tiny_model: Callable[..., Path], cache: Path) -> None:
    fingerprints = set()
    for quantization in ("none", *MODES):
        engine = Engine(options(tiny_model("llama", seed=1), kernels="torch", quantization=quantization))
        fingerprints |= {engine.root, engine.numerics_class}
        engine.close()
    assert len(fingerprints) == 6


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=NATIVE)])
def test_weights_that_are_not_finite_are_named(
    tiny_model: Callable[..., Path], cache: Path, tmp_path: Path, kernels: str
) -> None:
    path = tiny_model("llama", seed=1)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in path.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors[name][3, 5] = torch.inf
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(
        ModelError,
        match=r"broken: quantization = int8: layers.0.mlp.down_proj: row 3 of a weight .* has an infinity or a NaN",
    ):
        Engine(options(broken, kernels=kernels, quantization="int8"))
    Engine(options(broken, kernels=kernels)).close()


def test_unknown_quantizations_are_refused() -> None:
    with pytest.raises(ValidationError, match="'none', 'int8' or 'w8a8'"):
        EngineOptions(model="m", quantization="int4")
    with pytest.raises(ValidationError, match="packed_cache_bytes"):
        EngineOptions(model="m", packed_cache_bytes=-1)
    assert EngineOptions(model="m", quantization=None).quantization == "none"  # as vLLM says it
    assert EngineOptions(model="m", packed_cache_bytes="2GiB").packed_cache_bytes == 2 << 30
