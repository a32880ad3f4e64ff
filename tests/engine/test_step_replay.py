"""Steps from a record: not one bit differs from steps op by op, whatever runs; and what can't be recorded never is."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.memory import KvMemory
from engine.request import EngineRequest
from engine.step_replay import StepReplay
from kernels import cpu
from kernels.cpu.recording import RecordedStep
from kernels.paged import PagedBatch
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import TinyModel, random_prompt
from tests.quantized_checkpoints import gptq, quantized_copy
from tests.tiny_adapters import make_adapter

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "float32": ("llama", {"dtype": "float32"}),
    "qwen2 on two threads": ("qwen2", {"cpu_threads": 2}),
    "gemma3": ("gemma3", {}),
    "mistral": ("mistral", {}),
    "partial rotary": ("phi3", {}),
    "int8": ("qwen3", {"quantization": "int8"}),
    "w8a8": ("gemma3", {"quantization": "w8a8"}),
    "int8 cache": ("gemma3", {"kv_cache_dtype": "int8"}),
    "fp8 cache": ("qwen2", {"kv_cache_dtype": "fp8"}),
    "drafts": ("llama", {"speculative_config": DRAFTS}),
    "small chunks": ("qwen3", {"max_num_batched_tokens": 5, "max_num_seqs": 3}),
}
UNRECORDED = ("qwen3_moe", "deepseek_v2")


@pytest.fixture(autouse=True)
def _own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    yield
    cpu.load().configure_threads(1)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, sequences) of each step that ran from a record."""
    steps: list[tuple[int, int]] = []
    run = RecordedStep.run

    def counted(self: RecordedStep, num_rows: int, num_sequences: int, inputs: Any) -> torch.Tensor:
        steps.append((num_rows, num_sequences))
        return run(self, num_rows, num_sequences, inputs)

    monkeypatch.setattr(RecordedStep, "run", counted)
    return steps


def workload(engine: Engine, adapters: tuple[str, ...] = ("",)) -> list[Any]:
    """Every token, with its log-probabilities, of random requests that come and go; the same ones each time."""
    rng = random.Random(5)
    shared = random_prompt(20, seed=99).tolist()
    waiting = []
    for number in range(14):
        own = random_prompt(rng.choice((1, 5, 17, 30)), seed=number).tolist()
        params = SamplingParams(
            max_tokens=rng.choice((1, 4, 12)),
            temperature=rng.choice((0.0, 0.8)),
            seed=number,
            n=rng.choice((1, 1, 2)),
            top_k=rng.choice((0, 8)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            logprobs=rng.choice((None, 3)),
            ignore_eos=True,
        )
        prompt = tuple(shared[: rng.choice((0, 12, 20))] + own)
        name = rng.choice(adapters)
        adapter = engine.find_adapter(name) if name else None
        waiting.append(EngineRequest(f"r{number}", prompt, params, adapter=adapter))
    tokens = []
    while waiting or engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 2))):
            if waiting:
                engine.add(waiting.pop())
        step = engine.step()
        assert not step.failed
        tokens += [(t.request_id, t.choice, t.index, t.token_id, repr(t.logprobs)) for t in step.tokens]
    return sorted(tokens)


def options(path: Path, **fields: Any) -> EngineOptions:
    common: dict[str, Any] = {"dtype": "bfloat16", "block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 96}
    few_blocks: dict[str, Any] = {
        "kv_cache_memory_bytes": 120_000,
        "max_num_seqs": 6,
        "cpu_threads": 1,
        "kernels": "native",
    }
    return EngineOptions(model=str(path), **(common | few_blocks | fields))


def outputs(path: Path, adapters: tuple[str, ...] = ("",), **fields: Any) -> list[Any]:
    engine = Engine(options(path, **fields))
    try:
        found = workload(engine, adapters)
        engine.scheduler.check_integrity()
        return found
    finally:
        engine.close()


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_op_by_op(tiny_model: Callable[..., Path], replayed: list[tuple[int, int]], name: str) -> None:
    """Greedy and drawn, choices, prefix hits, chunks beside decodes, more sequences than there is room for."""
    family, fields = CASES[name]
    overrides = {"partial_rotary_factor": 0.5} if name == "partial rotary" else {}
    path = tiny_model(family, seed=1, dtype=fields.get("dtype", "bfloat16"), **overrides)
    expected = outputs(path, enforce_eager=True, **fields)
    assert not replayed
    assert outputs(path, **fields) == expected
    assert len(set(replayed)) > 5, "steps of many shapes were to be replayed"


def test_groups_in_another_order(
    tiny_model: Callable[..., Path], tmp_path: Path, replayed: list[tuple[int, int]]
) -> None:
    """Weights of a checkpoint in groups, whose columns the kernels take in another order."""
    path, _ = quantized_copy(tiny_model("llama", seed=1), tmp_path / "gptq", gptq(act_order=True))
    assert outputs(path) == outputs(path, enforce_eager=True)
    assert replayed


@pytest.mark.parametrize("family", UNRECORDED)
def test_what_torch_computes_runs_op_by_op(
    tiny_model: Callable[..., Path], replayed: list[tuple[int, int]], family: str
) -> None:
    path = tiny_model(family, seed=1, dtype="bfloat16")
    assert outputs(path) == outputs(path, enforce_eager=True)
    assert not replayed


def test_steps_with_adapters_run_op_by_op(
    tiny_model: Callable[..., Path], tmp_path: Path, replayed: list[tuple[int, int]]
) -> None:
    path = tiny_model("llama", seed=1, dtype="bfloat16")
    adapter = make_adapter(path, tmp_path / "adapter", targets=("q_proj", "down_proj"))
    fields: dict[str, Any] = {"enable_lora": True, "lora_modules": [f"a={adapter}"]}
    expected = outputs(path, ("", "a"), enforce_eager=True, **fields)
    assert outputs(path, ("", "a"), **fields) == expected
    assert replayed, "steps without an adapter were to be replayed"


def batch_of(model: TinyModel, block_table: list[int], length: int) -> PagedBatch:
    return PagedBatch.build([1], [length], [block_table], model.memory.layout.block_size)


def test_a_record_is_of_one_memory(tiny_model: Callable[..., Path], replayed: list[tuple[int, int]]) -> None:
    """Of one that is closed nothing is read or written; of another one another record is made."""
    tiny = TinyModel(tiny_model("llama", seed=1), kernels="native")
    replay = StepReplay(tiny.model, 8)
    ids, positions, batch = torch.tensor([7]), torch.tensor([2]), batch_of(tiny, [3], 3)
    first = replay.forward(ids, positions, batch, tiny.memory)
    record = replay.recorded
    assert torch.equal(replay.forward(ids, positions, batch, tiny.memory), first)
    assert replay.recorded is record
    assert record is not None

    other = KvMemory(tiny.memory.layout, tiny.memory.num_blocks)
    assert torch.equal(replay.forward(ids, positions, batch, other), first)
    assert replay.recorded is not record
    assert other.blocks[3].any()

    num_replayed = len(replayed)
    gone = weakref.ref(other.blocks)
    other.close()
    with pytest.raises(IndexError):
        replay.forward(ids, positions, batch, other)
    assert len(replayed) == num_replayed
    assert gone() is None, "a record must not keep the pool mapped"


def test_the_pool_stays_mapped_while_a_step_runs(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops run without the GIL, so that another thread may close it meanwhile."""
    tiny = TinyModel(tiny_model("llama", seed=1), kernels="native")
    replay, memory = StepReplay(tiny.model, 8), tiny.memory
    ids, positions, batch = torch.tensor([7]), torch.tensor([2]), batch_of(tiny, [3], 3)
    expected = replay.forward(ids, positions, batch, memory)
    mapped, run = weakref.ref(memory.buffer.base), RecordedStep.run

    def closed_before(self: RecordedStep, *arguments: Any) -> torch.Tensor:
        memory.close()
        assert mapped() is not None
        return run(self, *arguments)

    monkeypatch.setattr(RecordedStep, "run", closed_before)
    assert torch.equal(replay.forward(ids, positions, batch, memory), expected)
    assert mapped() is None


def test_token_ids_may_lie_apart(tiny_model: Callable[..., Path]) -> None:
    tiny = TinyModel(tiny_model("llama", seed=1), kernels="native", num_sequences=1)
    ids, positions = random_prompt(10, seed=1)[::2], torch.arange(5)
    batch = PagedBatch.build([5], [5], [tiny.place().block_table], tiny.memory.layout.block_size)
    expected = tiny.model.forward(ids, positions, batch, tiny.memory)
    assert torch.equal(StepReplay(tiny.model, 8).forward(ids, positions, batch, tiny.memory), expected)


def test_records_go_with_the_engine(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[RecordedStep]] = []
    initialize = RecordedStep.__init__

    def noted(self: RecordedStep, *arguments: Any) -> None:
        made.append(weakref.ref(self))
        initialize(self, *arguments)

    monkeypatch.setattr(RecordedStep, "__init__", noted)
    gc.collect()
    gc.disable()  # nothing that refers to itself
    try:
        outputs(tiny_model("llama", seed=1))
    finally:
        gc.enable()
    assert len(made) == 1
    assert made[0]() is None


def test_threads_record_and_run_beside_each_other(tiny_model: Callable[..., Path]) -> None:
    """As two engines of one process do: what one records the other runs."""
    paths = [tiny_model("qwen2", seed=1), tiny_model("gemma3", seed=1)]
    models = [TinyModel(path, kernels="native", num_sequences=1) for path in paths]
    cpu.load().configure_threads(2)
    ids, positions = random_prompt(20, seed=1), torch.arange(20)

    def agrees(tiny: TinyModel) -> bool:
        batch = PagedBatch.build([20], [20], [list(range(5))], tiny.memory.layout.block_size)
        expected = tiny.model.forward(ids, positions, batch, tiny.memory)
        found = [StepReplay(tiny.model, 32).forward(ids, positions, batch, tiny.memory) for _ in range(20)]
        return all(torch.equal(each, expected) for each in found)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(agrees, models))


def test_threads_may_change(tiny_model: Callable[..., Path]) -> None:
    """What an op does with the pool is decided when it runs."""
    tiny = TinyModel(tiny_model("qwen2", seed=1), kernels="native", num_sequences=1)
    replay, place = StepReplay(tiny.model, 64), tiny.place()
    ids, positions = random_prompt(40, seed=1), torch.arange(40)
    batch = PagedBatch.build([40], [40], [place.block_table], tiny.memory.layout.block_size)
    expected = tiny.model.forward(ids, positions, batch, tiny.memory)
    for threads in (1, 3, 2):
        cpu.load().configure_threads(threads)
        assert torch.equal(replay.forward(ids, positions, batch, tiny.memory), expected)
    with pytest.raises(IndexError, match="token ids must be from 0"):
        replay.forward(ids + 10**6, positions, batch, tiny.memory)
    assert torch.equal(replay.forward(ids, positions, batch, tiny.memory), expected)
