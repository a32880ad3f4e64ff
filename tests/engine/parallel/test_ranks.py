"""An engine on two ranks: the tokens of one, on every kernel set, and nothing of it left when it ends or dies."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from engine.engine import Engine
from engine.errors import EngineDied, ModelError
from engine.model_config import load_model_config
from engine.parallel.config import check_parallel, shard_config
from engine.parallel.group import RankGroup
from kernels import cpu
from pagewire.config import ConfigError, EngineOptions, engine_options
from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import make_engine
from tests.matrix.system import in_one_process
from tests.tiny_adapters import ALL, make_adapter

Tiny = Callable[..., Path]
PROMPTS = [[(31 * i + 7 * j) % 290 + 5 for j in range(n)] for i, n in enumerate((3, 16, 37))]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, seed=0)
PARAMS = [GREEDY, SamplingParams(max_tokens=16, n=2, ignore_eos=True, seed=7, logprobs=2), GREEDY]


def ranks_of(engine: Engine) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in sorted(engine._ranks._pids.values())] if engine._ranks else []


ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "ends": {"targets": ("embed_tokens", "lm_head", "o_proj", "k_proj"), "rank": 3},
    "some": {"targets": ("down_proj", "up_proj"), "rank_pattern": {"layers.1.mlp.up_proj": 7}},
}
"""More than there are slots."""
MIXED = ["all", "", "ends", "some", "all", "ends"]


@pytest.fixture(scope="module")
def lora(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of an engine with all of ADAPTERS."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        make_adapter(tiny_model("llama"), root / name, seed=seed, **fields)
    modules = tuple(f"{name}={root / name}" for name in ADAPTERS)
    return {"enable_lora": True, "max_loras": 2, "lora_modules": modules, "lora_root": root}


def tokens(model: Path, **options: Any) -> list[list[list[int]]]:
    engine = make_engine(model, **options)
    try:
        return engine.generate(PROMPTS, PARAMS)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(tiny_model: Tiny, lora: dict[str, Any]) -> Iterator[Engine]:
    engine = make_engine(tiny_model("llama"), tensor_parallel_size=2, **lora)
    yield engine
    engine.close()


@pytest.fixture
def nothing_is_left() -> None:
    """The module's engine lives on; the last test looks after it."""


def test_the_tokens_are_those_of_one_process(engine: Engine, tiny_model: Tiny) -> None:
    alone = tokens(tiny_model("llama"))
    assert engine.numerics_class.endswith("/tp2")
    for _ in range(2):  # the second time with a prefix to hit
        assert engine.generate(PROMPTS, PARAMS) == alone
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("adapter", ["", "all"])
def test_a_row_depends_on_itself_alone(engine: Engine, adapter: str) -> None:
    """Bit for bit: alone, in a batch, and in chunks of another size."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, seed=0, logprobs=3, prompt_logprobs=1)
    alone = [logprobs(engine, [prompt], params, adapter) for prompt in PROMPTS]
    together = logprobs(engine, PROMPTS, params, adapter)
    assert [found for each in alone for found in each] == together


def logprobs(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, adapter: str
) -> list[list[tuple[Any, ...]]]:
    work = {str(i): (prompt, params) for i, prompt in enumerate(prompts)}
    found = in_one_process(engine, work, adapter=adapter)
    return [[*each.choice(0).logprobs, *each.prompt_logprobs] for each in found.values()]


def test_adapters_give_what_they_give_in_one_process(
    engine: Engine, tiny_model: Tiny, lora: dict[str, Any], tmp_path: Path
) -> None:
    """Several in a batch, more of them than slots, then another one of a known name, and one less."""
    prompts = [[*PROMPTS[i % 3], 40 + i] for i in range(len(MIXED))]
    alone = make_engine(tiny_model("llama"), **lora)
    try:
        assert alone.adapters is not None
        assert engine.adapters is not None
        wanted = alone.generate(prompts, GREEDY, MIXED)
        assert engine.generate(prompts, GREEDY, MIXED) == wanted
        assert engine.generate(prompts[2:3], GREEDY, ["ends"]) == wanted[2:3]
        base = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [one == other for one, other in zip(base, wanted, strict=True)] == [not name for name in MIXED]
        make_adapter(tiny_model("llama"), lora["lora_root"] / "new", seed=9, targets=ALL)
        for each in (alone, engine):
            assert each.adapters is not None
            each.adapters.load("all", Path("new"), 1)
            each.adapters.unload("some")
            assert [(found.id.name, found.id.generation) for found in each.adapters.loaded()] == [
                ("all", 1),
                ("ends", 0),
            ]
        assert engine.find_adapter("all").key == alone.find_adapter("all").key
        renewed = alone.generate(prompts[:1], GREEDY, ["all"])
        assert engine.generate(prompts[:1], GREEDY, ["all"]) == renewed != wanted[:1]
    finally:
        alone.close()
    engine.scheduler.check_integrity()


def test_each_rank_has_its_share_of_the_weights(engine: Engine, tiny_model: Tiny) -> None:
    one = make_engine(tiny_model("llama"))
    whole = one._runner._model.num_bytes_read  # type: ignore[attr-defined]
    one.close()
    assert engine._runner._model.num_bytes_read == whole / 2  # type: ignore[attr-defined]


FAMILIES = [
    pytest.param("qwen3_moe", {}, 2, "native"),
    pytest.param("phi3", {"num_key_value_heads": 1}, 2, "native"),
    pytest.param("deepseek_v3", {}, 2, "native"),
    pytest.param("llama", {}, 4, "reference", marks=pytest.mark.nightly),
    *(
        pytest.param(family, {}, 2, kernels, marks=pytest.mark.nightly)
        for family in ("llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "phi3", "deepseek_v2", "deepseek_v3")
        for kernels in ("reference", "torch", "native")
    ),
]


@pytest.mark.parametrize(("family", "config", "size", "kernels"), FAMILIES)
def test_every_family(tiny_model: Tiny, family: str, config: dict[str, Any], size: int, kernels: str) -> None:
    """With fewer kv heads than ranks, several ranks have the same head."""
    if kernels == "native" and not cpu.available():
        pytest.skip(cpu.why_unavailable())
    model = tiny_model(family, **config)
    assert tokens(model, kernels=kernels, tensor_parallel_size=size) == tokens(model, kernels=kernels)


@pytest.mark.nightly
def test_over_gloo(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no native extension, and with Ray."""
    monkeypatch.setattr("engine.parallel.meeting.can_share", lambda: False)
    assert tokens(tiny_model("llama"), tensor_parallel_size=2) == tokens(tiny_model("llama"))


class Entered:
    """Rank 0's group, and whether it has been asked for a sum."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.is_entered = threading.Event()

    def sum(self, x: Tensor) -> Tensor:
        self.is_entered.set()
        return self._group.sum(x)


def test_a_killed_rank_is_noticed_at_once_and_named(engine: Engine) -> None:
    """In the middle of a step that waits for it. The last test with the module's engine."""
    (rank,) = ranks_of(engine)
    model = engine._runner._model  # type: ignore[attr-defined]
    model._own.group = group = Entered(model._own.group)
    rank.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(engine.generate, [[5, 6, 7]], GREEDY)
        assert group.is_entered.wait(30)
        rank.send_signal(signal.SIGKILL)
        failed = step.exception(30)
    error = engine.death.exception(5)
    assert isinstance(error, EngineDied)
    assert str(error) == f"rank 1 (process {rank.pid}) has died: signal SIGKILL"
    assert isinstance(failed, EngineDied)
    assert str(failed) == str(error)
    engine.close()
    engine.close()
    assert not psutil.pid_exists(rank.pid)


def options(model: Path, **more: Any) -> EngineOptions:
    return engine_options(model=str(model), dtype="float32", tensor_parallel_size=2, **more)


def test_what_can_not_be_shared_out_is_refused_by_name(tiny_model: Tiny) -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match=r"tensor_parallel_size = 3: 4 attention heads can't be shared evenly by 3"):
        check_parallel(options(model).model_copy(update={"tensor_parallel_size": 3}))
    with pytest.raises(ModelError, match=r"tensor_parallel_size = 8: 4 attention heads"):
        shard_config(load_model_config(model), 0, 8)
    with pytest.raises(ModelError, match="not supported with model_impl = transformers"):
        check_parallel(options(model, model_impl="transformers"))
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2: pipeline parallelism is not supported yet"):
        options(model, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 2 on device = cuda needs .* = mp, not ray"):
        options(model, device="cuda", distributed_executor_backend="ray")


def test_a_rank_that_can_not_load_says_why(tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())  # the module's engine lives if not all tests before this one have run
    dump = EngineOptions.model_dump
    monkeypatch.setattr(EngineOptions, "model_dump", lambda self: dump(self) | {"model": str(tmp_path / "gone")})
    with pytest.raises(ModelError, match=r"rank 1: .*gone: no such directory"):
        make_engine(tiny_model("llama"), tensor_parallel_size=2)
    assert set(psutil.Process().children()) <= before
