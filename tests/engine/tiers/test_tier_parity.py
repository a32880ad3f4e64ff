"""A real model with a tier: cold, warm on the device and warm from the tier give the same tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import EngineError
from engine.tiers.store_tier import StoreSettings
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.tiers.costs import load_whatever_it_costs
from tests.valkey import Server

PROMPTS = [list(range(10, 10 + num_tokens)) for num_tokens in (3, 4, 5, 8, 17, 40)]
PARAMS = [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), SamplingParams(max_tokens=6, seed=7, n=2)]
ALL_BUT_THE_LAST = sum(min(len(prompt) // 4 * 4, len(prompt) - 1) for prompt in PROMPTS)
"""Tokens that a second round finds."""


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


def _options(model: Path, **options: object) -> EngineOptions:
    fields = {"block_size": 4, "kernels": "torch", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 20}
    return EngineOptions.model_validate({"model": str(model), **fields, **options})


def test_cold_and_warm_from_the_tier_are_equal(tiny_model: Callable[..., Path]) -> None:
    """CASES F1, F6."""
    model = tiny_model("llama")
    cold = Engine(_options(model, enable_prefix_caching=False))
    engine = Engine(_options(model, kv_offloading_size="1MiB"))
    load_whatever_it_costs(engine.tiers)
    assert engine.tiers is not None
    for params in PARAMS:
        expected = cold.generate(PROMPTS, params)
        for _ in range(2):
            assert engine.generate(PROMPTS, params) == expected
            assert engine.tiers.quiesce()
            assert engine.kv_cache.reset() > 0
    stats = engine.kv_cache.stats()
    assert stats.num_hit_tokens >= 2 * (4 + 4 + 16 + 36)
    engine.scheduler.check_integrity()
    engine.tiers.check_integrity()
    assert stats.num_referenced == 0
    engine.close()
    cold.close()


def test_the_memory_goes_even_if_a_tier_cannot_be_closed(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(_options(tiny_model("llama"), kv_offloading_size="1MiB"))
    assert engine.tiers is not None
    close = engine.tiers.close

    def fail() -> None:
        close()
        raise OSError("broken")

    monkeypatch.setattr(engine.tiers, "close", fail)
    with pytest.raises(OSError, match="broken"):
        engine.close()
    assert engine.memory.buffer.shape[0] == 0


def test_reset_prefix_cache_reaches_the_tier(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(_options(tiny_model("llama"), kv_offloading_size="1MiB"))
    assert engine.tiers is not None
    engine.generate(PROMPTS[-1:], PARAMS[0])
    assert engine.tiers.quiesce()
    engine.reset_prefix_cache()
    engine.generate(PROMPTS[-1:], PARAMS[0])
    assert engine.kv_cache.stats().num_hit_tokens == 0
    engine.close()


def test_sizes_are_checked(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    with pytest.raises(EngineError, match=r"kv_offloading_size = 9 bytes: one block takes \d+"):
        Engine(_options(model, kv_offloading_size="9b"))
    with pytest.raises(EngineError, match=r"kv_offloading_size = \d+ bytes: the system has \d+ to give"):
        Engine(_options(model, kv_offloading_size=1 << 20))  # a million GiB
    with pytest.raises(ValueError, match="kv_offloading_size needs enable_prefix_caching"):
        _options(model, kv_offloading_size="1MiB", enable_prefix_caching=False)
    assert _options(model, kv_offloading_size=1.5).kv_offloading_size == 3 << 29
    assert _options(model, kv_offloading_size="2").kv_offloading_size == 2 << 30


def test_a_restarted_engine_goes_on_from_its_disk(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """CASES F1, D3: the same model finds its blocks, another one does not."""
    disk = {"kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": "4MiB"}
    expected, hits = [], []
    for family in ("llama", "llama", "qwen3"):
        engine = Engine(_options(tiny_model(family), **disk))
        assert engine.tiers is not None
        load_whatever_it_costs(engine.tiers)
        expected.append(engine.generate(PROMPTS, PARAMS[0]))
        hits.append(engine.kv_cache.stats().num_hit_tokens)
        assert engine.tiers.quiesce()
        engine.close()
    assert expected[0] == expected[1] != expected[2]
    in_each_other = 4 + 4 + 16  # prompts that come together: each begins with the one before it
    assert hits == [in_each_other, ALL_BUT_THE_LAST, in_each_other]


def test_disk_options_are_checked(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="kv_disk_path and kv_disk_size must be given together"):
        _options(model, kv_disk_path=str(tmp_path))
    with pytest.raises(EngineError, match=r"kv_disk_size = 100 bytes: a file with one block takes \d+"):
        Engine(_options(model, kv_disk_path=str(tmp_path), kv_disk_size="100b"))
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"kv_disk_path = .*file: .*Not a directory"):
        Engine(_options(model, kv_disk_path=str(tmp_path / "file"), kv_disk_size="1MiB"))


def test_another_engine_goes_on_from_the_store(tiny_model: Callable[..., Path]) -> None:
    """CASES F1, D3: one of the same model loads what another has computed, and one of another model does not."""
    results, hits = [], []
    with Server() as server:
        store = {"kv_store_url": server.url, "kv_store_size": "4MiB", "kv_offloading_size": "1MiB"}
        for family in ("llama", "llama", "qwen3"):
            engine = Engine(_options(tiny_model(family), **store))
            assert engine.tiers is not None
            assert engine.tiers.store is not None
            load_whatever_it_costs(engine.tiers)
            engine.tiers.store.settings = StoreSettings(min_deadline=60)
            results.append([engine.generate(PROMPTS, params) for params in PARAMS])
            assert engine.tiers.quiesce()
            counts = engine.tiers.counts()
            hits.append((counts["store"][1]["stored"] > 0, engine.kv_cache.stats().num_hit_tokens))
            engine.scheduler.check_integrity()
            engine.tiers.check_integrity()
            engine.close()
    assert results[0] == results[1] != results[2]
    assert hits[0][1] < hits[1][1] == 2 * ALL_BUT_THE_LAST, "both times, the first time from the store"
    assert (hits[0][0], hits[1][0], hits[2][0]) == (True, False, True)


def test_store_options_are_checked(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="kv_store_url and kv_store_size must be given together"):
        _options(model, kv_store_url="redis://127.0.0.1:1")
    with pytest.raises(ValueError, match="must be a URL with one of the schemes"):
        _options(model, kv_store_url="http://127.0.0.1:1", kv_store_size=1)
    with pytest.raises(EngineError, match=r"kv_store_size = 100 bytes: one block takes \d+ there"):
        Engine(_options(model, kv_store_url="redis://127.0.0.1:1", kv_store_size="100b"))
    with pytest.raises(EngineError, match=r"kv_store_url: bad Redis URL .*: several hosts"):
        Engine(_options(model, kv_store_url="redis://a,b", kv_store_size=1))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("int8", marks=pytest.mark.nightly)])
def test_a_model_with_windows_comes_back_from_every_tier(
    tiny_model: Callable[..., Path], tmp_path: Path, kv_cache_dtype: str
) -> None:
    """Cold, from host memory, after a restart from disk, in another engine from the store: with the bits of one group.

    Pools are too small for all prompts together, so that the device evicts and preempts by itself too.
    """
    model = tiny_model("gemma3")
    prompts = [[5 + (11 * i + 7 * salt + i * i) % 290 for i in range(75 - 9 * salt)] for salt in range(4)]
    fields: dict[str, object] = {"max_model_len": 96, "kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 32}
    plain = Engine(_options(model, **fields, disable_hybrid_kv_cache_manager=True))
    expected = [plain.generate(prompts, params) for params in PARAMS]
    fields["kv_cache_memory_bytes"] = 35 * plain.memory.buffer.shape[1]
    plain.close()
    hits = []
    with Server() as server:
        disk = {"kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": "8MiB"}
        store = {"kv_store_url": server.url, "kv_store_size": "16MiB"}
        host = {"kv_offloading_size": "4MiB"}
        for options in (host | disk | store, disk, store):
            engine = Engine(_options(model, **fields, **options))
            assert engine.tiers is not None
            assert engine.kv_cache.groups.slides
            load_whatever_it_costs(engine.tiers)
            if engine.tiers.store is not None:
                engine.tiers.store.settings = StoreSettings(min_deadline=60)
            assert engine.generate(prompts, PARAMS[0]) == expected[0]
            hits.append(engine.kv_cache.stats().num_hit_tokens)
            for params, tokens in zip(PARAMS, expected, strict=True):
                assert engine.tiers.quiesce()
                engine.kv_cache.reset()
                assert engine.generate(prompts, params) == tokens
            assert engine.kv_cache.stats().num_hit_tokens > hits[-1] + 100
            engine.scheduler.check_integrity()
            engine.tiers.check_integrity()
            engine.close()
    assert min(hits[1:]) > hits[0] + 100, "others find it the first time too"
