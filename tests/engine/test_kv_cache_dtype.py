"""`kv_cache_dtype`: what it changes of an engine, how far log-probabilities move, and who takes whose blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.rates import Rate
from engine.request import EngineRequest
from engine.tiers.store_tier import StoreSettings
from kernels import cpu
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.valkey import Server

KERNELS = ["reference", "torch", *(["native"] if cpu.available() else [])]
PROMPT = [(7 * i) % 250 + 10 for i in range(45)]
TOLERANCE = {"int8": 0.04, "fp8": 0.2}
"""Of the mean change of log p, on these models of random weights; without scales it is above 1."""


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


def engine_of(model: Path, kv_cache_dtype: str, **options: object) -> Engine:
    fields = {"block_size": 4, "kernels": "torch", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 18}
    named = {"model": str(model), "kv_cache_dtype": kv_cache_dtype}
    return Engine(EngineOptions.model_validate(fields | named | options))


def logprobs(engine: Engine) -> list[float]:
    """Of the prompt's own tokens; the engine is closed."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    engine.add(EngineRequest("r", tuple(PROMPT), params))
    found: list[float] = []
    while engine.has_work:
        for part in engine.step().prompt_logprobs:
            found += [entry.logprob for entry in part.entries]
    engine.close()
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_log_probabilities_move_little(tiny_model: Callable[..., Path], family: str, kernels: str) -> None:
    model = tiny_model(family)
    plain = logprobs(engine_of(model, "auto", kernels=kernels))
    for kv_cache_dtype, tolerance in TOLERANCE.items():
        found = logprobs(engine_of(model, kv_cache_dtype, kernels=kernels))
        changes = [abs(one - other) for one, other in zip(found, plain, strict=True)]
        assert 0 < sum(changes) / len(changes) < tolerance, kv_cache_dtype


@pytest.mark.parametrize("kernels", KERNELS[1:])
def test_chunks_change_no_bit(tiny_model: Callable[..., Path], kernels: str) -> None:
    for kv_cache_dtype in TOLERANCE:
        whole, chunked = (
            logprobs(engine_of(tiny_model("llama"), kv_cache_dtype, kernels=kernels, max_num_batched_tokens=size))
            for size in (64, 7)
        )
        assert whole == chunked


def test_fp8_is_fp8_e4m3_and_every_format_has_its_own_keys(tiny_model: Callable[..., Path]) -> None:
    seen = {}
    for name in ("auto", "int8", "fp8", "fp8_e4m3"):
        engine = engine_of(tiny_model("llama"), name, dtype="bfloat16")
        seen[name] = (engine.root, engine.layout_id, engine.numerics_class, engine.kv_cache.num_blocks)
        engine.close()
    assert seen["fp8"] == seen["fp8_e4m3"]
    assert len({root for root, *_ in seen.values()}) == 3
    assert "bfloat16+kv_fp8_e4m3/" in seen["fp8"][2]
    assert "kv" not in seen["auto"][2]
    # A head has 16 numbers here: 32 bytes in bfloat16, 16 and a scale of 4 quantized.
    layers_and_tokens = 3 * 2 * 2 * 4
    assert seen["auto"][3] == (1 << 18) // (layers_and_tokens * 32)
    assert seen["int8"][3] == seen["fp8"][3] == (1 << 18) // (layers_and_tokens * 20)


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype[\s\S]*'auto', 'fp8', 'fp8_e4m3' or 'int8'"):
        EngineOptions(model="m", kv_cache_dtype="fp8_e5m2")  # type: ignore[arg-type]


def test_a_disk_gives_blocks_back_to_the_same_format_alone(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    disk = {"kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": "4MiB"}
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    results, hits = [], []
    for name in ("int8", "int8", "fp8", "fp8", "auto"):
        engine = engine_of(tiny_model("llama"), name, **disk)
        results.append(engine.generate([PROMPT], params))
        hits.append(engine.kv_cache.stats().num_hit_tokens)
        assert engine.tiers is not None
        assert engine.tiers.quiesce()
        engine.close()
    assert hits == [0, 44, 0, 44, 0], "a file of another format is emptied"
    assert results[0] == results[1]
    assert results[2] == results[3]


def test_a_store_gives_blocks_to_the_same_format_alone(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    results, hits = [], []
    with Server() as server:
        for name in ("int8", "fp8", "int8"):
            engine = engine_of(tiny_model("llama"), name, kv_store_url=server.url, kv_store_size="4MiB")
            assert engine.tiers is not None
            assert engine.tiers.store is not None
            engine.tiers.store.costs.prefill = Rate(1e-3, 1e9)  # else a tiny model computes sooner than it asks
            engine.tiers.store.settings = StoreSettings(min_deadline=60)
            results.append(engine.generate([PROMPT], params))
            hits.append(engine.kv_cache.stats().num_hit_tokens)
            assert engine.tiers.quiesce()
            engine.close()
    assert hits == [0, 0, 44]
    assert results[0] == results[2]
