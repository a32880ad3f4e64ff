"""Tiny models with sliding windows: KV groups give blocks back, and not one bit of a token changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.request import EngineRequest, TokenOutput
from kvstore.kv_groups import RELEASED
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import hugging_face

GREEDY = SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(max_tokens=9, seed=11, n=3, top_p=0.9, ignore_eos=True, logprobs=3)
LENGTHS = (3, 15, 16, 17, 33, 48, 75)
PROMPTS = [[5 + (11 * i + 7 * salt + i * i) % 290 for i in range(length)] for salt, length in enumerate(LENGTHS)]
SLIDING = {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma3", {}),
    "mistral": ("mistral", {}),  # every layer slides
    "phi3": ("phi3", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
}


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def build(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(name: str = "gemma", window: int | None = None, **options: Any) -> Engine:
        family, overrides = MODELS[name]
        path = tiny_model(family, seed=1, **(overrides | ({} if window is None else {"sliding_window": window})))
        fields = {"block_size": 4, "kernels": "torch", "cpu_threads": 1, "dtype": "float32", "max_model_len": 96}
        fields["kv_cache_memory_bytes"] = 1 << 20
        engines.append(Engine(EngineOptions(model=str(path), **{**fields, **options})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.check_integrity()
        assert engine.kv_cache.num_referenced == 0
        engine.close()


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Every token with its log-probabilities; the requests run together. What a step leaves behind is checked."""
    for i, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(i), tuple(prompt), params))
    tokens: list[TokenOutput] = []
    while engine.has_work:
        step = engine.step()
        assert not step.failed
        tokens += step.tokens
        check_held(engine)
    return sorted((t.request_id, t.choice, t.index, t.token_id, t.logprobs) for t in tokens)


def check_held(engine: Engine) -> None:
    """No sequence holds more than a window, a chunk and a block of a group that slides, nor less than the next token
    sees."""
    groups = engine.kv_cache.groups
    for sequence in engine.scheduler._queues.running:
        for group, table in enumerate(sequence.tables):
            held = [block_id for block_id in table if block_id != RELEASED]
            most = groups.most_held(group)
            assert most is None or len(held) <= most
            assert RELEASED not in table[groups.first_block(group, sequence.num_computed_tokens) :]


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_layers(build: Callable[..., Engine], name: str) -> None:
    engine = build(name)
    windows = engine.config.layer_windows
    groups = engine.kv_cache.groups
    assert groups.slides
    assert sorted(layer for group in groups.groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups.groups for layer in group.layers)
    assert len(groups) * groups.layers_per_block == len(windows), "no padding here"
    off = build(name, disable_hybrid_kv_cache_manager=True)
    assert off.kv_cache.groups.is_plain
    assert off.root != engine.root


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_the_same_bits_with_and_without(build: Callable[..., Engine], name: str, chunk: int) -> None:
    on = build(name, max_num_batched_tokens=chunk, max_num_seqs=3)
    off = build(name, disable_hybrid_kv_cache_manager=True)
    for params in (GREEDY, SAMPLED):
        assert run(on, PROMPTS, params) == run(off, PROMPTS, params)
        assert run(on, PROMPTS, params) == run(off, PROMPTS, params), "now out of the cache"


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 64, 200])
def test_windows_around_the_block_size(build: Callable[..., Engine], window: int) -> None:
    """Smaller than, equal to and larger than a block, a chunk and the prompts."""
    on = build(window=window, max_num_batched_tokens=8, max_num_seqs=2)
    off = build(window=window, disable_hybrid_kv_cache_manager=True)
    for _ in range(2):
        assert run(on, PROMPTS, GREEDY) == run(off, PROMPTS, GREEDY)


def test_tokens_are_hugging_faces(build: Callable[..., Engine]) -> None:
    engine = build(max_num_batched_tokens=16, max_num_seqs=4)
    oracle = hugging_face(engine.config.path)
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=13, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output[0] == expected[0, len(prompt) :].tolist()
