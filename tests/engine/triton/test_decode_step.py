"""Decode steps over fixed buffers, and their graphs: padding shows nowhere, refills are seen, nobody waits.

On CPU tensors, in the interpreter. A graph's stand-in replays recorded ops and launches (`recorded.py`), so what the
host would bake into a CUDA graph is baked in here too.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.decode_graphs import GRAPH_BYTES, DecodeGraphs, buckets, graph_bytes
from engine.decode_step import DecodeRow, DecodeStep
from engine.device_runner import DeviceRunner, StepQueued
from engine.engine import Engine
from engine.kernel_set import load_kernel_set
from engine.memory import KvLayout, KvMemory
from engine.model_config import load_model_config
from engine.models.registry import load_model
from engine.request import EngineRequest
from engine.sample import SampleRow
from engine.sequence import Schedule, ScheduledSequence, Sequence
from kernels.triton import linear, sample
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import random_prompt
from tests.engine.triton.recorded import nobody_waits, record
from tests.kernels.triton.tensors import random

BLOCK, MAX_LEN, V = 4, 24, 300


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sample, "_CHUNK", 512)
    monkeypatch.setattr(linear, "_ADDED", 512)


class Case:
    """A model of one layer with a pool of random KV."""

    def __init__(self, path: Path, max_rows: int = 4) -> None:
        config = load_model_config(str(path))
        self.model = load_model(config, load_kernel_set("triton"))
        self.memory = KvMemory(KvLayout.of(config, BLOCK), 20)
        self.kv = random(*self.memory.blocks.shape, seed=3) / 4
        self.step = DecodeStep(self.model, self.memory, BLOCK, max_rows=max_rows, max_model_len=MAX_LEN)
        self.max_rows = max_rows

    def fill(self, rows: list[DecodeRow]) -> None:
        self.memory.blocks.copy_(self.kv)
        self.step.fill(rows)

    def run(self, rows: list[DecodeRow], num_rows: int, longest: int) -> tuple[Tensor, list[int]]:
        """(logits, drawn tokens) of the rows."""
        self.fill(rows)
        logits = self.step.run(num_rows, longest)
        return logits[: len(rows)].clone(), self.step.drawn[: len(rows)].tolist()

    def written(self) -> set[tuple[int, int]]:
        """(block, slot) of whatever has changed in the pool."""
        changed = (self.memory.blocks != self.kv).any(-1).any(1).any(1).any(1)
        return {(int(block), int(slot)) for block, slot in changed.nonzero()}


@pytest.fixture
def case(tiny_model: Callable[..., Path]) -> Case:
    return Case(tiny_model("llama", num_hidden_layers=1))


def rows() -> list[DecodeRow]:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_k=7, top_p=0.9),
        SamplingParams(temperature=1.1, min_p=0.01),
    ]
    tables = [[3, 9, 4], [11, 0], [7, 8, 1, 2, 5]]
    positions = [8, 7, 18]
    return [
        DecodeRow(SampleRow(i, own, 5 + i, 0, position + 1), position, [table], [], token_id=20 + i)
        for i, (own, position, table) in enumerate(zip(params, positions, tables, strict=True))
    ]


SLOTS = {(4, 0), (0, 3), (5, 2)}


def same(found: tuple[Tensor, list[int]], expected: tuple[Tensor, list[int]]) -> bool:
    return torch.equal(found[0], expected[0]) and found[1] == expected[1]


def test_padding_changes_no_bit_and_writes_to_no_slot(case: Case) -> None:
    expected = case.run(rows(), 3, 19)
    assert case.written() == SLOTS
    assert same(case.run(rows(), 4, MAX_LEN), expected)
    assert case.written() == SLOTS
    for i, row in enumerate(rows()):
        alone = case.run([row], 1, MAX_LEN)
        assert torch.equal(alone[0][0], expected[0][i])
        assert alone[1] == expected[1][i : i + 1]


def test_a_graph_sees_what_its_buffers_are_filled_with(case: Case) -> None:
    expected, alone = case.run(rows(), 3, 19), case.run(rows()[2:], 1, 19)
    case.fill([])
    graphs = DecodeGraphs(case.step, record, longest=MAX_LEN)
    assert case.written() == set(), "capturing writes to no slot"

    def replayed(own: list[DecodeRow]) -> tuple[Tensor, list[int]]:
        case.fill(own)
        longest = 1 + max(row.position for row in own)
        return graphs.run(len(own), longest).clone(), case.step.drawn[: len(own)].tolist()

    assert same(replayed(rows()), expected)
    assert case.written() == SLOTS
    assert same(replayed(rows()[2:]), alone)  # fewer, in a smaller graph
    assert case.written() == {(5, 2)}, "rows of the step before write no more"
    reordered = replayed(rows()[::-1])  # other rows in the same places
    assert same((reordered[0].flip(0), reordered[1][::-1]), expected)


def test_a_row_goes_on_from_what_the_step_before_has_drawn(case: Case) -> None:
    _, drawn = case.run(rows(), 3, 19)
    behind = [replace(row, position=row.position + 1, tables=[[*row.tables[0], 19]]) for row in rows()[:2]]
    known = [replace(row, token_id=token) for row, token in zip(behind, drawn, strict=False)]
    unknown = [replace(behind[0], source=0), replace(behind[1], source=1)]
    before = case.step.drawn.clone()
    expected = case.run(known, 2, 19)
    case.step.drawn.copy_(before)
    assert same(case.run(unknown, 2, 19), expected)
    case.step.drawn.copy_(before)
    swapped = case.run(unknown[::-1], 4, MAX_LEN)  # rows move up when others end
    assert torch.equal(swapped[0].flip(0), expected[0])


def test_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(64) == [1, 2, 4, 8, 16, 32, 64]


def test_the_room_left_for_graphs_has_the_logits_of_each() -> None:
    assert graph_bytes(1000, 6, V) == 1000 + 4 * V * (1 + 2 + 4) + 4 * GRAPH_BYTES


def sequence(prompt: list[int], table: list[int], params: SamplingParams, computed: int) -> Sequence:
    request = EngineRequest("r", tuple(prompt), params)
    own: dict[str, Any] = {"block_table": table, "num_computed_tokens": computed, "choices_to_sample": (0,)}
    return Sequence(request, 0, 0, list(prompt), **own)


def decodes(*params: SamplingParams) -> Schedule:
    """A step in which sequences of 9 and 7 tokens decode one each."""
    prompts = [random_prompt(length, seed=length).tolist() for length in (9, 7)]
    tables = [[3, 9, 4], [11, 0]]
    items = (
        ScheduledSequence(sequence(prompt, table, own, len(prompt) - 1), 1, True)
        for prompt, table, own in zip(prompts, tables, params, strict=True)
    )
    return Schedule(tuple(items))


@pytest.fixture
def runner(case: Case) -> DeviceRunner:
    made = DeviceRunner(case.model, case.memory, max_num_seqs=2, max_model_len=MAX_LEN)
    case.memory.blocks.copy_(case.kv)
    return made


PLAIN = SamplingParams(temperature=0.8, seed=3)
EDITED = SamplingParams(temperature=0.0, logit_bias={7: 3.0}, logprobs=2)


@pytest.mark.parametrize("params", [(PLAIN, PLAIN), (PLAIN, EDITED)], ids=["drawn by the graph", "drawn again"])
def test_nothing_in_a_decode_step_waits_but_its_end(
    runner: DeviceRunner, params: tuple[SamplingParams, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = runner.execute(decodes(*params))  # what is set up once is not the step's
    schedule = decodes(*params)
    with nobody_waits(monkeypatch) as fetched:
        running = runner.start(schedule)
        assert isinstance(running, StepQueued)
        assert fetched == []
        assert running.finish() == expected
    assert len(fetched) == (1 if EDITED not in params else 5)  # the tokens; log-probabilities in four parts


def test_nothing_in_a_step_with_a_prompt_waits_but_its_end(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed() -> Schedule:
        prompt = random_prompt(23, seed=1).tolist()
        item = ScheduledSequence(sequence(prompt, [5, 6, 7, 8, 12, 13], PLAIN, 0), 23, True)
        return Schedule((*decodes(PLAIN, PLAIN).items[:1], item), copies=((3, 14),))

    expected, schedule = runner.execute(mixed()), mixed()
    with nobody_waits(monkeypatch) as fetched:
        assert runner.execute(schedule) == expected
    assert fetched == ["(2,)"]


def test_the_guard_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(3)
    waiting: list[Callable[[], object]] = [
        lambda: tensor[0].item(),
        lambda: bool(tensor.any()),
        lambda: tensor.cpu(),
        lambda: tensor.nonzero(),
        lambda: tensor[tensor > 0],
        lambda: tensor.to("cpu"),
        lambda: torch.tensor([1], device="cpu"),
    ]
    with nobody_waits(monkeypatch):
        for call in waiting:
            with pytest.raises(AssertionError, match="wait"):
                call()


def test_a_row_that_is_broken_says_so_alone(runner: DeviceRunner, case: Case) -> None:
    case.memory.blocks[9] = torch.nan  # of the first sequence
    (broken,), (good,) = runner.start(decodes(PLAIN, PLAIN)).finish()
    assert (broken.token_id, broken.error) == (-1, "the model's logits at position 9 are not finite")
    assert good.error is None
    (with_bias,), (again,) = runner.start(decodes(EDITED, PLAIN)).finish()
    assert with_bias.error == "the model's logits at position 9 are not finite"
    assert again == good


def options(path: Path, **changes: Any) -> EngineOptions:
    fields = {"block_size": 4, "kernels": "triton", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 18}
    return EngineOptions(model=str(path), max_model_len=32, max_num_seqs=3, **{**fields, **changes})


# By day ahead of its results and in graphs, then partly in graphs; at night graphs alone as well.
CHANGES: tuple[dict[str, Any], ...] = ({"async_scheduling": True}, {"max_seq_len_to_capture": 8})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", CHANGES, id="llama"),
        *(pytest.param(family, ({}, *CHANGES), id=f"{family}: all", marks=pytest.mark.nightly)
          for family in ("llama", "gemma3")),
    ],
)  # fmt: skip
def test_graphs_and_asynchronous_scheduling_change_no_token(
    family: str, changes: tuple[dict[str, Any], ...], tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(family, num_hidden_layers=1) if family == "llama" else tiny_model(family)
    prompts = [random_prompt(length, seed=length).tolist() for length in (5, 2, 9)]
    params = [
        SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=6, seed=4, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=3, seed=5, logprobs=1, min_tokens=2, logit_bias={8: 1.0}),
    ]
    outputs = []
    for each in ({"enforce_eager": True}, *changes):
        engine = Engine(options(path, **each))
        outputs.append(engine.generate(prompts, params))
        engine.scheduler.check_integrity()
        assert engine.kv_cache.num_referenced == 0
        engine.close()
    assert all(output == outputs[0] for output in outputs)
