"""Every pair of features gives the tokens of the plain path: in one process, and through prefill and decode workers.

CI runs a ring of the pairs in which each feature is twice, nightly all of them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import StepOutput
from router.request import GenerateCall, TokenPrompt
from tests.chaos.zygote import Zygote
from tests.decode_svc.harness import make_engine, until
from tests.matrix.forked_ranks import ForkedRanks
from tests.matrix.settings import (
    ADAPTER_DIR,
    FULL,
    GPTQ_DIR,
    MODEL,
    PROMPTS,
    REFUSED,
    SETTINGS,
    SLIDING,
    Pair,
    table,
)
from tests.matrix.system import Result, in_one_process, system
from tests.quantized_checkpoints import gptq, quantized_copy
from tests.tiny_adapters import make_adapter

DOC = Path(__file__).parents[2] / "docs" / "features.md"
NAMES = list(SETTINGS)
# Neighbours at a distance of three, so that no feature is only beside its like.
RING = {frozenset({name, NAMES[(at + 3) % len(NAMES)]}) for at, name in enumerate(NAMES)}
PAIRS = [
    pytest.param(Pair(*pair), id=" + ".join(pair), marks=() if frozenset(pair) in RING else pytest.mark.nightly)
    for pair in combinations(NAMES, 2)
    if frozenset(pair) not in REFUSED
]
Expected = Callable[[Pair], dict[str, Result]]
Make = Callable[[Pair, dict[str, Any]], Engine]
Paths = dict[str, dict[str, Path]]


@pytest.fixture(scope="module", autouse=True)
def forked_ranks(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ranks start quickly."""
    log = tmp_path_factory.mktemp("ranks") / "ranks.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.parallel.start.ChildProcesses", lambda: ForkedRanks(zygote, log))
        yield


@pytest.fixture(scope="module")
def paths(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """By family: what stands for paths in options, and the paths."""
    return {family: paths_of(tiny_model(family), tmp_path_factory.mktemp(family)) for family in (FULL, SLIDING)}


def paths_of(model: Path, directory: Path) -> dict[str, Path]:
    quantized, _ = quantized_copy(model, directory, gptq(group_size=-1, act_order=True))
    return {MODEL: model, ADAPTER_DIR: make_adapter(model, directory / "adapter"), GPTQ_DIR: quantized}


def filled(value: Any, paths: dict[str, Path]) -> Any:
    """Options with the paths in their places."""
    if isinstance(value, dict):
        return {name: filled(each, paths) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(filled(each, paths) for each in value)
    if isinstance(value, str):
        for name, path in paths.items():
            value = value.replace(name, str(path))
    return value


@pytest.fixture(scope="module")
def make(paths: Paths) -> Make:
    """An engine on the pair's model."""

    def engine(pair: Pair, options: dict[str, Any]) -> Engine:
        own = paths[pair.family]
        return make_engine(own[pair.model], **filled(options, own))

    return engine


@pytest.fixture(scope="module")
def expected(make: Make) -> Expected:
    """Each prompt alone, with nothing on that is not meant to change the output; computed once."""
    known: dict[str, dict[str, Result]] = {}

    def find(pair: Pair) -> dict[str, Result]:
        what = repr((pair.family, pair.model, pair.plain_options, pair.sampling, pair.adapter))
        if what not in known:
            engine = make(pair, pair.plain_options)
            known[what] = {}
            for name, prompt in PROMPTS.items():
                known[what] |= in_one_process(engine, {name: (prompt, pair.sampling)}, adapter=pair.adapter)
            engine.close()
        return known[what]

    return find


@pytest.mark.parametrize("pair", PAIRS)
def test_in_one_process(make: Make, expected: Expected, pair: Pair) -> None:
    """Twice: the second time there is a prefix to hit or to load."""
    engine, seen = make(pair, pair.options), Counter[str]()
    assert engine.kv_cache.groups.slides == (pair.family == SLIDING)

    def watch(step: StepOutput) -> None:
        seen["hits"] += sum(num_tokens for _, num_tokens in step.cached)
        seen["loads"] += sum(num_tokens for *_, num_tokens in step.loaded)
        seen["drafts"] += sum(drafted for drafted, _ in step.drafts)

    try:
        for _ in range(2):
            work = {name: (prompt, pair.sampling) for name, prompt in PROMPTS.items()}
            assert in_one_process(engine, work, adapter=pair.adapter, watch=watch) == expected(pair)
            forget_the_device(engine)
        engine.scheduler.check_integrity()
        seen["preemptions"] = engine.scheduler.num_preemptions
    finally:
        engine.close()
    for name in (pair.one, pair.other):
        effect = SETTINGS[name].has_effect
        if effect and not prevented(pair, effect):
            assert seen[effect], f"{name}: there were no {effect}"


def forget_the_device(engine: Engine) -> None:
    """What a tier has is then only there."""
    if engine.tiers is not None:
        assert engine.tiers.quiesce()
        engine.kv_cache.reset()


def prevented(pair: Pair, effect: str) -> bool:
    """What the notes in docs/features.md say."""
    return effect in ("hits", "loads") and pair.has("log-probabilities")


@pytest.mark.parametrize("pair", PAIRS)
async def test_through_services(paths: Paths, expected: Expected, pair: Pair) -> None:
    migrates, own = pair.has("migration"), paths[pair.family]
    options = filled(pair.options, own)
    async with system(own[pair.model], num_prefill=1, num_decode=2 if migrates else 1, **options) as running:
        for _ in range(2):
            calls = [
                GenerateCall(TokenPrompt(tuple(prompt)), pair.sampling, adapter=pair.adapter)
                for prompt in PROMPTS.values()
            ]
            first, *others = calls
            found = await asyncio.gather(
                running.generate(first, break_after=5 if migrates else None), *map(running.generate, others)
            )
            for result, (name, wanted) in zip(found, expected(pair).items(), strict=True):
                for choice in result.choices.values():
                    choice.text = ""  # engines have none
                assert result == wanted, name
            await until(lambda: all(engine.tiers is None or engine.tiers.quiesce(0) for engine in running.engines))
            for engine in running.engines:
                forget_the_device(engine)
        assert bool(running.num_migrations) == migrates


def test_what_cannot_be_together_is_refused(make: Make) -> None:
    """By name, or one option holds both, so that there is no way to ask for them."""
    for pair in map(sorted, REFUSED):
        one, other = (SETTINGS[name].options for name in pair)
        if one.keys() & other.keys():
            continue
        asked = Pair(*pair)
        reason = r"quantization = (int8|w8a8): the checkpoint is quantized already \(gptq"
        with pytest.raises(ValueError, match=reason):
            make(asked, asked.options)


def test_the_documentation_has_this_table() -> None:
    assert table() in DOC.read_text(encoding="utf-8"), table()


def test_each_feature_is_in_the_ring() -> None:
    assert Counter(name for pair in RING for name in pair) == dict.fromkeys(NAMES, 2)
    assert all(len(pair) == 2 for pair in RING)
    assert not any({one, other} in map(set, RING) for one, other in pairwise(NAMES))
