"""Tiers below a pool in device memory: what was evicted comes back through staging, and the tokens are the same."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import device_staging
from engine.engine import Engine
from engine.tiers.store_tier import StoreSettings
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.e2e.oracle import clear_greedy
from tests.engine.tiers.costs import load_whatever_it_costs
from tests.tiny_models import VOCAB_SIZE
from tests.valkey import Server

NUM_TOKENS = 2


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device_staging, "LANE_BYTES", 1)  # a block at a time


def round_trip(model: Path, **tiers: object) -> None:
    """Computed, written back, forgotten by the device, loaded: Hugging Face's tokens each time."""
    oracle = clear_greedy(model, 18, NUM_TOKENS, vocab=VOCAB_SIZE, seed=8)
    options = {"model": str(model), "kernels": "triton", "block_size": 4, "cpu_threads": 1, "max_model_len": 64}
    engine = Engine(EngineOptions.model_validate({**options, "kv_cache_memory_bytes": 1 << 17, **tiers}))
    assert engine.tiers is not None
    load_whatever_it_costs(engine.tiers)
    if engine.tiers.store is not None:
        engine.tiers.store.settings = StoreSettings(min_deadline=60)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for num_hits in (0, 16):
        before = engine.kv_cache.stats().num_hit_tokens
        assert engine.generate([list(oracle.prompt)], params) == [[list(oracle.output)]]
        assert engine.kv_cache.stats().num_hit_tokens - before == num_hits
        assert engine.tiers.quiesce()
        assert engine.kv_cache.reset() > 0
        engine.memory.blocks.fill_(7.0)
    engine.scheduler.check_integrity()
    engine.tiers.check_integrity()
    assert not engine.memory.num_busy_lanes
    engine.close()


def test_host_and_disk(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Two blocks stay in host memory, the others come from the disk."""
    model = tiny_model("llama", num_hidden_layers=2)
    round_trip(model, kv_offloading_size="4KiB", kv_disk_path=str(tmp_path / "disk"), kv_disk_size="1MiB")


def test_blocks_go_to_the_shared_store_and_come_back(tiny_model: Callable[..., Path]) -> None:
    with Server() as server:
        round_trip(tiny_model("llama", num_hidden_layers=2), kv_store_url=server.url, kv_store_size="1MiB")
