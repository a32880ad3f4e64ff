"""Tiny models with sliding windows: KV groups give blocks back, and not one bit of a token changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.request import ChoiceState, EngineRequest, TokenOutput
from kvstore.kv_groups import RELEASED
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import hugging_face

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(max_tokens=5, seed=11, n=3, top_p=0.9, ignore_eos=True, logprobs=3)
LENGTHS = (3, 16, 33, 75)
PROMPTS = [[5 + (11 * i + 7 * salt + i * i) % 290 for i in range(length)] for salt, length in enumerate(LENGTHS)]
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


LATER = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("gemma", 16),
        ("mistral", 3),
        *(pytest.param(name, chunk, marks=LATER) for name in MODELS for chunk in (3, 16, 64)),
    ],
)
def test_the_same_bits_with_and_without(build: Callable[..., Engine], name: str, chunk: int) -> None:
    on = build(name, max_num_batched_tokens=chunk, max_num_seqs=3)
    off = build(name, disable_hybrid_kv_cache_manager=True)
    for params in (GREEDY, SAMPLED):
        assert run(on, PROMPTS, params) == run(off, PROMPTS, params)
        assert run(on, PROMPTS, params) == run(off, PROMPTS, params), "now out of the cache"


@pytest.mark.parametrize("window", [4, *(pytest.param(w, marks=LATER) for w in (1, 2, 3, 5, 8, 9, 64, 200))])
def test_windows_around_the_block_size(build: Callable[..., Engine], window: int) -> None:
    """Smaller than, equal to and larger than a block, a chunk and the prompts."""
    on = build(window=window, max_num_batched_tokens=8, max_num_seqs=2)
    off = build(window=window, disable_hybrid_kv_cache_manager=True)
    for _ in range(2):
        assert run(on, PROMPTS, GREEDY) == run(off, PROMPTS, GREEDY)


def test_tokens_are_hugging_faces(build: Callable[..., Engine]) -> None:
    engine = build(max_num_batched_tokens=16, max_num_seqs=4)
    oracle = hugging_face(engine.config.path)
    outputs = engine.generate(PROMPTS[2:], GREEDY)
    for prompt, output in zip(PROMPTS[2:], outputs, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output[0] == expected[0, len(prompt) :].tolist()


def test_a_long_sequence_fits_a_small_pool(build: Callable[..., Engine]) -> None:
    """With groups the pool that held 40 tokens of every layer holds far more, and says so at the start."""
    sizes = build(disable_hybrid_kv_cache_manager=True)
    small = {"kv_cache_memory_bytes": 12 * sizes.memory.layout.block_bytes, "max_num_batched_tokens": 8}
    off, on = build(disable_hybrid_kv_cache_manager=True, **small), build(**small)
    assert (off.max_model_len, on.max_model_len) == (48, 96)
    prompt = [5 + (7 * i + i * i) % 290 for i in range(70)]
    assert on.generate([prompt, prompt[3:]], GREEDY) == sizes.generate([prompt, prompt[3:]], GREEDY)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_speculation_and_migration(build: Callable[..., Engine], name: str) -> None:
    """Drafts look ahead and are rolled back; a request goes on elsewhere with its output so far."""
    speculative = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
    on, off = build(name, speculative_config=speculative), build(name, disable_hybrid_kv_cache_manager=True)
    prompt = 4 * [7, 9, 30, 7, 11, 12]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logit_bias={40: 30.0, 50: 30.0})
    expected = off.generate([prompt], params)[0][0]
    assert on.generate([prompt], params)[0][0] == expected
    state = ChoiceState(0, tuple(expected[:25]))
    on.add(EngineRequest("moved", tuple(prompt), params, choices=(state,)))
    tokens: list[int] = []
    while on.has_work:
        tokens += [token.token_id for token in on.step().tokens]
    assert tokens == expected[25:]


@pytest.mark.parametrize("kv_format", ["int8", pytest.param("fp8", marks=LATER)])
def test_one_byte_cells(build: Callable[..., Engine], kv_format: str) -> None:
    on = build(kv_cache_dtype=kv_format, max_num_batched_tokens=16)
    off = build(kv_cache_dtype=kv_format, disable_hybrid_kv_cache_manager=True)
    assert run(on, PROMPTS, GREEDY) == run(off, PROMPTS, GREEDY)


def test_what_says_no_to_groups(build: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    """Tiers, where no group keeps a chain whole."""
    assert build(kv_offloading_size="1MiB").kv_cache.groups.slides
    assert not caplog.text
    assert build("mistral", kv_offloading_size="1MiB").kv_cache.groups.is_plain
    assert (
        "layers with a window keep the KV of the whole sequence: all of them slide, kv_offloading_size" in caplog.text
    )


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_what_others_left_behind_a_sequences_end_is_never_read(build: Callable[..., Engine], kernels: str) -> None:
    """A window smaller than a block: its only block begins after what has been given back, and has stale rows."""
    fields = {"window": 8, "block_size": 16, "max_num_batched_tokens": 8, "max_num_seqs": 2, "kernels": kernels}
    on, off = build(**fields), build(**fields, disable_hybrid_kv_cache_manager=True)
    assert on.kv_cache.groups.slides
    for engine in (on, off):
        engine.memory.buffer[:] = 0xFF  # NaN
    assert run(on, PROMPTS[1:3], GREEDY) == run(off, PROMPTS[1:3], GREEDY)


def test_a_window_that_no_sequence_outgrows_does_not_slide(
    build: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the pool holds: workers with other pools need the same groups."""
    full, slides = build("mistral", max_model_len=11), build("mistral", max_model_len=12)
    assert full.kv_cache.groups.is_plain
    assert slides.kv_cache.groups.slides
    small = build("mistral", max_model_len=12, kv_cache_memory_bytes=2 * full.memory.layout.block_bytes)
    assert small.max_model_len < 11
    assert small.root == slides.root
    assert build("mistral", window=1 << 20, max_model_len=None).kv_cache.groups.is_plain
    caplog.clear()
    assert build("mistral", max_model_len=11, disable_hybrid_kv_cache_manager=True).root == full.root
    assert "layers with a window" not in caplog.text
