"""Adapters in one engine: equal to merged weights, alone and in mixed batches, however work is shared or repeated."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.errors import RequestRefused
from engine.lora.errors import AdapterError, AdapterNotFound
from engine.lora.slots import AdapterSlots
from engine.request import EngineRequest
from kernels import cpu
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams, StructuredOutput
from tests.engine.tiers.costs import load_whatever_it_costs
from tests.tiny_adapters import ALL, make_adapter, merge

Build = Callable[..., Engine]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, seed=5, n=2, ignore_eos=True)
BLOCK_BYTES = 3 * 2 * 2 * 4 * 16 * 4  # layers, K and V, kv heads, tokens, head size, float32
PROMPTS = [[(7 * i + 11 * j) % 250 + 10 for i in range(9 + 4 * j)] for j in range(6)]
VARIETY: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"targets": ("q_proj", "v_proj"), "rank": 8},
    "rs": {"use_rslora": True, "alpha": 3.0, "targets": ("o_proj", "down_proj", "up_proj")},
    "pattern": {"rank_pattern": {"layers.1.mlp.gate_proj": 7, "k_proj": 2}},
}


@pytest.fixture
def build(tiny_model: Callable[..., Path], tmp_path: Path) -> Build:
    """An engine with adapters by name; `adapters` are the arguments of `make_adapter`."""

    def make(family: str = "llama", adapters: dict[str, dict[str, Any]] = VARIETY, **options: Any) -> Engine:
        model = tiny_model(family)
        modules = []
        for seed, (name, arguments) in enumerate(adapters.items()):
            directory = tmp_path / family / name
            if not directory.exists():
                make_adapter(model, directory, seed=seed, **arguments)
            modules.append(f"{name}={directory}")
        fields: dict[str, Any] = {
            "model": str(model), "block_size": 4, "kernels": "torch", "cpu_threads": 1, "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 20, "enable_lora": True, "max_loras": 4, "lora_modules": tuple(modules),
        }  # fmt: skip
        return Engine(EngineOptions(**fields | options))

    return make


def plain(model: Path) -> Engine:
    options = {"block_size": 4, "kernels": "torch", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 20}
    return Engine(EngineOptions(model=str(model), **options))


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_a_mixed_batch_gives_each_request_what_its_merged_model_gives(
    build: Build, family: str, tmp_path: Path
) -> None:
    engine = build(family)
    names = ["all", "", "attention", "rs", "pattern", "all"]
    outputs = engine.generate(PROMPTS, GREEDY, names)
    base = plain(Path(engine.options.model))
    unlike = 0
    for name in ("", *VARIETY):
        rows = [i for i, each in enumerate(names) if each == name]
        merged = base
        if name:
            merged = plain(merge(Path(engine.options.model), tmp_path / family / name, tmp_path / f"merged-{name}"))
        prompts = [PROMPTS[i] for i in rows]
        assert [outputs[i] for i in rows] == merged.generate(prompts, GREEDY), name
        unlike += bool(name) and merged.generate(prompts, GREEDY) != base.generate(prompts, GREEDY)
    assert unlike == len(VARIETY), "an adapter that changes nothing shows nothing"


def test_embeddings_and_the_head_are_adapted_too(build: Build, tmp_path: Path) -> None:
    adapters = {"ends": {"targets": ("embed_tokens", "lm_head", "q_proj")}, "head": {"targets": ("lm_head",)}}
    engine = build(adapters=adapters)
    names = ["ends", "head", "", "ends"]
    outputs = engine.generate(PROMPTS[:4], GREEDY, names)
    for name in adapters:
        merged = plain(merge(Path(engine.options.model), tmp_path / "llama" / name, tmp_path / f"merged-{name}"))
        rows = [i for i, each in enumerate(names) if each == name]
        assert [outputs[i] for i in rows] == merged.generate([PROMPTS[i] for i in rows], GREEDY)


@pytest.mark.parametrize(
    "kernels",
    ["torch", pytest.param("native", marks=pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable()))],
)
def test_logprobs_are_the_same_alone_and_among_others(build: Build, kernels: str, tmp_path: Path) -> None:
    """Bit for bit: requests with four adapters and none, all at once and one by one."""
    names = ["all", "", "attention", "rs", "pattern", "all"]
    params = replace(SAMPLED, logprobs=2)

    def run(engine: Engine, rows: list[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for i in rows:
            adapter = engine.find_adapter(names[i]) if names[i] else None
            engine.add(EngineRequest(f"{i}", tuple(PROMPTS[i]), params, adapter=adapter))
        while engine.has_work:
            for token in engine.step().tokens:
                found.setdefault(f"{token.request_id}/{token.choice}", []).append((token.token_id, token.logprobs))
        return found

    together = run(build(kernels=kernels), list(range(6)))
    engine = build(kernels=kernels, enable_prefix_caching=False)
    alone: dict[str, list[Any]] = {}
    for i in range(6):
        alone |= run(engine, [i])
    assert alone == together


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_checked_with_the_adapter(build: Build, tiny_model: Callable[..., Path], method: str) -> None:
    """Prompts that repeat themselves, or the base model as draft, so that there are drafts, and some come true."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config |= {"model": str(tiny_model("llama")), "least_acceptance": 0.0}
    prompts = [[*range(20 + i, 26 + i)] * 4 for i in range(3)]
    names, params = ["all", "", "rs"], replace(GREEDY, max_tokens=40)
    expected = build().generate(prompts, params, names)
    engine = build(speculative_config=json.dumps(config))
    for i, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        adapter = engine.find_adapter(name) if name else None
        engine.add(EngineRequest(f"{i}", tuple(prompt), params, adapter=adapter))
    outputs: dict[str, list[int]] = {}
    drafted: dict[bool, int] = {True: 0, False: 0}
    while engine.has_work:
        step = engine.step()
        for token in step.tokens:
            outputs.setdefault(token.request_id, []).append(token.token_id)
        for num_drafted, num_accepted in step.drafts:
            drafted[True] += num_accepted
            drafted[False] += num_drafted - num_accepted
    assert [[outputs[f"{i}"]] for i in range(3)] == expected
    assert min(drafted.values()) > 0, "none came true, or all"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8, "kv_cache_memory_bytes": 18 * BLOCK_BYTES},
        {"max_loras": 1},
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.nightly),
    ],
    ids=["chunks and preemption", "one slot", "no cache"],
)
@pytest.mark.parametrize("params", [pytest.param(GREEDY, marks=pytest.mark.nightly), SAMPLED], ids=["greedy", "n"])
def test_the_tokens_do_not_depend_on_how_it_runs(build: Build, options: dict[str, Any], params: SamplingParams) -> None:
    names = ["all", "", "attention", "rs", "pattern", "all"]
    alone = build(enable_prefix_caching=False)
    expected = [alone.generate([prompt], params, [name])[0] for prompt, name in zip(PROMPTS, names, strict=True)]
    engine = build(**options)
    assert engine.generate(PROMPTS, params, names) == expected
    if engine.num_blocks == 18:
        assert engine.scheduler.num_preemptions
    engine.scheduler.check_integrity()
    assert engine.kv_cache.num_referenced == 0


def test_a_grammar_holds_with_an_adapter(build: Build) -> None:
    structure = StructuredOutput("regex", "[a-z]{3}-[0-9]{4}")
    engine, params = build(), replace(GREEDY, ignore_eos=False, structured_output=structure)
    alone = [build().generate([PROMPTS[0]], params, [name])[0] for name in ("all", "")]
    assert engine.generate([PROMPTS[0]] * 2, params, ["all", ""]) == alone
    assert alone[0] != alone[1]


def test_equal_prompts_share_blocks_with_nobody_elses_adapter(build: Build, tmp_path: Path) -> None:
    """CASES D3: a reload under the same name too."""
    engine = build(lora_root=tmp_path)
    prompt = list(range(20, 41))

    def cached(name: str) -> int:
        adapter = engine.find_adapter(name) if name else None
        engine.add(EngineRequest("r", tuple(prompt), GREEDY, adapter=adapter))
        found = [count for step in iter_steps(engine) for _, count in step.cached]
        return found[0]

    assert [cached(name) for name in ("", "all", "rs", "", "all", "rs")] == [0, 0, 0, 20, 20, 20]
    assert engine.adapters is not None
    first = engine.find_adapter("all")
    engine.adapters.load("all", Path("llama/all"), 7)
    again = engine.find_adapter("all")
    assert again.digest == first.digest
    assert again.key != first.key
    assert cached("all") == 0, "another load's KV was used"
    assert engine.find_adapter("all", first.digest, first.generation) is first, "requests are on their way with it"
    with pytest.raises(AdapterNotFound, match="was loaded anew: generation 7"):
        engine.find_adapter("all", first.digest, 3)
    rs = engine.generate([prompt], GREEDY, ["rs"])
    assert engine.generate([prompt], GREEDY, ["all"]) != rs
    engine.adapters.load("all", Path("llama/rs"), 8)
    assert engine.generate([prompt], GREEDY, ["all"]) == rs, "the name's old content"


def iter_steps(engine: Engine) -> list[Any]:
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    engine.kv_cache.take_events()
    return steps


def test_what_runs_goes_on_after_an_unload(build: Build) -> None:
    engine = build()
    expected = build().generate([PROMPTS[0]], GREEDY, ["all"])[0][0]
    engine.add(EngineRequest("r", tuple(PROMPTS[0]), GREEDY, adapter=engine.find_adapter("all")))
    tokens = [token.token_id for token in engine.step().tokens]
    assert engine.adapters is not None
    engine.adapters.unload("all")
    with pytest.raises(AdapterNotFound, match="'all' is not loaded; loaded are: attention, pattern, rs"):
        engine.find_adapter("all")
    tokens += [token.token_id for step in iter_steps(engine) for token in step.tokens]
    assert tokens == expected
    assert engine.generate([PROMPTS[1]], GREEDY) == plain(Path(engine.options.model)).generate([PROMPTS[1]], GREEDY)


@pytest.mark.parametrize("fails_at", ["memory", "write"])
def test_an_adapter_that_cannot_be_put_on_the_device_fails_alone_and_leaves_nothing(
    build: Build, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot that it was to have goes to another adapter, which changes fewer modules."""
    names = ["all", "attention", ""]
    expected = build().generate(PROMPTS[:3], GREEDY, names)
    engine = build(max_loras=2)
    adapter: Any = engine.find_adapter("all")
    with monkeypatch.context() as patch:
        if fails_at == "memory":
            make, made = AdapterSlots._make, iter(range(99))

            def fail(slots: AdapterSlots, projection: Any) -> Any:
                if next(made) == 2:
                    raise RuntimeError("not enough memory")
                return make(slots, projection)

            patch.setattr(AdapterSlots, "_make", fail)
        else:
            modules = dict(adapter.weights.modules)
            last = list(modules)[-1]
            modules[last] = replace(modules[last], b=modules[last].b[:, :5])
            adapter = replace(adapter, weights=replace(adapter.weights, modules=modules))
        for i, each in enumerate((adapter, engine.find_adapter("attention"), None)):
            engine.add(EngineRequest(f"{i}", tuple(PROMPTS[i]), GREEDY, adapter=each))
        steps = iter_steps(engine)
    (failed,) = [each for step in steps for each in step.failed]
    assert (failed.request_id, "adapter 'all' can't be put on the device: RuntimeError" in failed.message) == (
        "0",
        True,
    )
    for i in (1, 2):
        tokens = [each.token_id for step in steps for each in step.tokens if each.request_id == f"{i}"]
        assert [tokens] == expected[i]
    assert engine.kv_cache.num_referenced == 0
    engine.scheduler.check_integrity()
    assert engine.generate(PROMPTS[:1], GREEDY, ["all"]) == expected[:1]


def test_blocks_of_an_adapter_come_back_from_a_tier_for_it_alone(build: Build) -> None:
    """CASES D4: evicted with one adapter, asked for with another and without any."""
    engine = build(kv_offloading_size="1MiB")
    load_whatever_it_costs(engine.tiers)
    prompt = list(range(20, 41))
    names = ("all", "rs", "")
    expected = {name: each[0] for name, each in zip(names, build().generate([prompt] * 3, GREEDY, names), strict=True)}

    def ask(name: str) -> tuple[list[int], dict[str, int]]:
        adapter = engine.find_adapter(name) if name else None
        engine.add(EngineRequest("r", tuple(prompt), GREEDY, adapter=adapter))
        steps = iter_steps(engine)
        tokens = [token.token_id for step in steps for token in step.tokens]
        return tokens, {tier: num for step in steps for _, tier, num in step.loaded}

    with closing(engine):
        assert ask("all") == (expected["all"], {})
        assert engine.tiers is not None
        assert engine.tiers.quiesce()
        engine.kv_cache.reset()
        for name in ("rs", ""):
            assert ask(name) == (expected[name], {})
        engine.kv_cache.reset()
        assert ask("all") == (expected["all"], {"host": 20})


def test_an_engine_without_adapters_refuses_them_by_name(build: Build) -> None:
    lora = build()
    engine = plain(Path(lora.options.model))
    with pytest.raises(AdapterNotFound, match="'all': this engine serves no adapters"):
        engine.generate([PROMPTS[0]], GREEDY, ["all"])
    with pytest.raises(RequestRefused, match="adapter: 'all': this engine serves no adapters"):
        engine.check(EngineRequest("r", (5,), GREEDY, adapter=lora.find_adapter("all")))


def test_an_adapter_named_at_start_must_be_servable(build: Build) -> None:
    with pytest.raises(AdapterError, match=r"rank 7, the limit \(max_lora_rank\) is 4"):
        build(max_lora_rank=4, adapters={"pattern": VARIETY["pattern"]})
    assert ALL
