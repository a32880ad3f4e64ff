"""One engine, real tiny models: tokens and log-probabilities are the same bits whatever the cache and the chunks do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import EngineRequest, TokenOutput
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

# What families have of their own is the models', see test_models_rows.py; windows make a second group of blocks.
LATER = [pytest.param(family, marks=pytest.mark.nightly) for family in ("qwen2", "qwen3", "qwen3_moe", "phi3")]
FAMILIES = ["llama", "gemma3", *LATER]
LENGTHS = (33, 48, 64, 7)
PROMPTS = [[5 + (11 * i + 7 * salt + i * i) % 290 for i in range(length)] for salt, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(max_tokens=9, seed=11, n=2, top_p=0.9, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def build(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(family: str, **options: Any) -> Engine:
        fields = {"block_size": 4, "kernels": "torch", "cpu_threads": 1, "dtype": "float32", "max_model_len": 96}
        path = tiny_model(family, seed=1)
        engines.append(Engine(EngineOptions(model=str(path), **{**fields, **options})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.check_integrity()
        assert engine.kv_cache.num_referenced == 0
        engine.close()


def run(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> tuple[list[Any], int]:
    """(choice, index, token id, its log-probabilities) of all tokens, and the prompt tokens found in the cache."""
    engine.add(EngineRequest(name, tuple(prompt), params))
    tokens: list[TokenOutput] = []
    num_cached = 0
    while engine.has_work:
        step = engine.step()
        assert not step.failed
        tokens += step.tokens
        num_cached += sum(number for _, number in step.cached)
    return sorted((t.choice, t.index, t.token_id, t.logprobs) for t in tokens), num_cached


@pytest.mark.parametrize("family", FAMILIES)
def test_evicted_prompts_give_the_same_bits_again(build: Callable[..., Engine], family: str) -> None:
    """CASES F6: run, let others evict its blocks, run again; and once more out of what is then cached."""
    sizes = build(family, kv_cache_memory_bytes=1 << 20)
    block_bytes = int(sizes.memory.buffer.shape[1]) * len(sizes.kv_cache.groups)
    engine = build(family, kv_cache_memory_bytes=26 * block_bytes, max_num_batched_tokens=24, max_num_seqs=4)
    for params in (GREEDY, SAMPLED):
        for number, prompt in enumerate(PROMPTS):
            first, _ = run(engine, f"first-{number}", prompt, params)
            for salt in range(2):
                other = [5 + (13 * i + 100 * salt + 3 * number) % 290 for i in range(80)]
                run(engine, f"other-{number}-{salt}", other, GREEDY)
            evicted, num_cached = run(engine, f"evicted-{number}", prompt, params)
            assert num_cached == 0, "its blocks were to be evicted"
            cached, num_cached = run(engine, f"cached-{number}", prompt, params)
            assert num_cached == min(len(prompt) // 4 * 4, len(prompt) - 1)
            assert first == evicted == cached


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_give_the_same_bits(build: Callable[..., Engine], family: str) -> None:
    """Chunks smaller than a block and larger than most prompts, in one process."""
    results = []
    for chunk in (3, 64):
        engine = build(family, kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=chunk)
        results.append([run(engine, str(i), prompt, params)[0] for params in (GREEDY, SAMPLED)
                        for i, prompt in enumerate(PROMPTS)])  # fmt: skip
    assert results[0] == results[1]
