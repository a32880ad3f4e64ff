"""How large the pool is, what that does to the longest sequence, and what is said about it."""

import logging
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.sizing import PoolSize, available_memory, size_pool

ASKED: dict[str, Any] = {
    "block_bytes": 1000,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_position": 512,
    "max_model_len": None,
    "kv_cache_memory_bytes": None,
    "kv_cache_memory_share": 0.3,
    "available_bytes": 10_000_000,
}


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, PoolSize(4 * 32, 512)),  # capped to what four full sequences use
        ({"available_bytes": 200_000}, PoolSize(60, 512)),
        ({"available_bytes": 100_000}, PoolSize(30, 480)),
        ({"available_bytes": 100_000, "kv_cache_memory_share": 0.1}, PoolSize(10, 160)),
        ({"max_model_len": 100}, PoolSize(4 * 7, 100)),
        ({"kv_cache_memory_bytes": 700_999}, PoolSize(700, 512)),  # asked for: not capped
        ({"kv_cache_memory_bytes": 3_999}, PoolSize(3, 48)),
        ({"kv_cache_memory_bytes": 3_999, "draft_block_bytes": 333}, PoolSize(3, 48)),  # both models' in 1333
        ({"kv_cache_memory_bytes": 3_999, "draft_block_bytes": 334}, PoolSize(2, 32)),
        ({"kv_cache_memory_bytes": 1_000, "max_model_len": 16}, PoolSize(1, 16)),
    ],
)
def test_the_pools_size_follows_from_what_is_asked(changes: dict[str, Any], size: PoolSize) -> None:
    assert size_pool(**{**ASKED, **changes}) == size


def test_a_lowered_limit_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engine.sizing"):
        size_pool(**{**ASKED, "kv_cache_memory_bytes": 3_999})
    warning, info = caplog.messages
    assert warning == (
        "max_model_len lowered from 512 to 48: the KV pool (kv_cache_memory_bytes = 3999) holds 3 blocks of 16 tokens"
    )
    assert info.startswith("KV pool: 3 blocks of 16 tokens, 0.0 MiB (kv_cache_memory_bytes = 3999); max_model_len 48")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache_memory_bytes": 999},
            "kv_cache_memory_bytes = 999: no room for two tokens, a block of 16 takes 1000",
        ),
        ({"available_bytes": 1000}, "30% of the 0.0 MiB that are free: no room"),
        ({"max_model_len": 513}, "max_model_len = 513: the model has 512 positions"),
    ],
)
def test_impossible_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        size_pool(**{**ASKED, **changes})


@pytest.mark.parametrize(
    ("limit", "usage", "available"),
    [(None, None, 4096_000), ("max", "5", 4096_000), ("3000", "1000", 2000), ("1", "5", 0)],
)
def test_available_memory(tmp_path: Path, limit: str | None, usage: str | None, available: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n")
    if limit is not None and usage is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(usage + "\n")
    assert available_memory(tmp_path, tmp_path) == available


def test_this_machine_has_memory() -> None:
    assert available_memory() > 1 << 20
