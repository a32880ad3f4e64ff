"""Adapters on quantized weights: the adapter's sums stay in the compute dtype, whatever the weights below them are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.engine import Engine
from kernels import cpu
from pagewire.config import EngineOptions
from tests.engine.lora.test_engine import GREEDY, PROMPTS
from tests.quantized_checkpoints import gptq, quantized_copy
from tests.tiny_adapters import make_adapter

NAMES = ["", "a", "b", "a"]


def engine_of(model: Path, adapters: Path, kernels: str, quantization: str) -> Engine:
    modules = tuple(f"{name}={adapters / name}" for name in "ab")
    fields = {
        "model": str(model), "block_size": 4, "kernels": kernels, "cpu_threads": 1, "max_num_seqs": 8,
        "quantization": "none" if quantization == "gptq" else quantization, "kv_cache_memory_bytes": 1 << 20,
        "enable_lora": True, "max_loras": 2, "lora_modules": modules,
    }  # fmt: skip
    return Engine(EngineOptions.model_validate(fields))


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "gptq"])
def test_adapters_on_quantized_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")
    for seed, name in enumerate("ab"):
        make_adapter(model, tmp_path / name, seed=seed)
    if quantization == "gptq":
        model, _ = quantized_copy(model, tmp_path, gptq(group_size=-1))
    for kernels in ("reference", "native") if cpu.available() else ("reference",):
        engine = engine_of(model, tmp_path, kernels, quantization)
        try:
            together = engine.generate(PROMPTS[:4], GREEDY, NAMES)
            alone = [engine.generate([prompt], GREEDY, [name])[0] for prompt, name in zip(PROMPTS, NAMES, strict=False)]
            base = engine.generate(PROMPTS[:4], GREEDY)
        finally:
            engine.close()
        assert together == alone, kernels
        assert together[0] == base[0]
        assert all(together[i] != base[i] for i in (1, 2, 3)), "an adapter that changes nothing shows nothing"
        if kernels == "reference":
            expected = together
        elif quantization != "w8a8":
            assert together == expected, "native equals the reference where products are of numbers"
