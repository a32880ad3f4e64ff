"""Ranks with a device each, in Triton's interpreter: a pool for each rank's heads, and the tokens of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.engine import Engine
from engine.errors import ModelError
from engine.parallel.start import start_ranks
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import random_prompt

Tiny = Callable[..., Path]
PROMPTS = [random_prompt(length, seed=3).tolist() for length in (3, 21)]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=3, n=2, ignore_eos=True, seed=7)


def options(path: Path, **changes: Any) -> EngineOptions:
    fields = {"block_size": 4, "kernels": "triton", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 18}
    fields |= {"max_num_batched_tokens": 16}
    return EngineOptions(model=str(path), max_model_len=64, **{**fields, **changes})


def tokens(path: Path, **changes: Any) -> list[list[list[int]]]:
    """In chunks; the second time with a prefix that a tier brings back, which the other ranks have not computed."""
    engine = Engine(options(path, kv_offloading_size="1MiB", **changes))
    try:
        found = engine.generate(PROMPTS, [GREEDY, SAMPLED])
        assert engine.tiers is not None
        assert engine.tiers.quiesce()
        engine.kv_cache.reset()
        engine.memory.blocks.zero_()
        assert engine.generate(PROMPTS, [GREEDY, SAMPLED]) == found
        engine.scheduler.check_integrity()
        return found
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


CASES = [
    pytest.param("qwen3", {"num_hidden_layers": 1}, {}, marks=pytest.mark.nightly),
    pytest.param("llama", {"num_key_value_heads": 1}, {"kv_cache_dtype": "fp8"}, marks=pytest.mark.nightly),
    pytest.param("gemma3", {}, {"async_scheduling": True}, marks=pytest.mark.nightly),
    pytest.param("mixtral", {}, {}, marks=pytest.mark.nightly),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "shape", "changes"), CASES)
def test_the_tokens_are_those_of_one_process(
    tiny_model: Tiny, family: str, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    path = tiny_model(family, **shape)
    assert tokens(path, tensor_parallel_size=2, **changes) == tokens(path, **changes)


def test_fewer_gpus_than_ranks_are_said_before_anything_starts(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match="tensor_parallel_size = 2: each rank needs a GPU, and torch sees 1"):
        start_ranks(options(tiny_model("llama"), device="cuda", tensor_parallel_size=2))


def test_without_a_gpu_the_reason_is_said_and_no_rank_is_left(tiny_model: Tiny) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ModelError, match="device = cuda"):
        Engine(options(tiny_model("llama"), device="cuda", tensor_parallel_size=2))
    assert set(psutil.Process().children()) <= before
