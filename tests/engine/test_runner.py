"""The runner: a schedule becomes tensors, copies happen first, sampled rows come back item by item."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import build_batch
from engine.request import EngineRequest
from engine.runner import ModelRunner, set_cpu_threads
from engine.sample import SampledToken, SampleRow
from engine.sampler import Sampler
from engine.sequence import Schedule, ScheduledSequence, Sequence
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import TinyModel, random_prompt

GREEDY = SamplingParams(temperature=0.0, seed=7)


def sequence(
    token_ids: list[int],
    block_table: list[int],
    *,
    prompt: int | None = None,
    computed: int = 0,
    choices: tuple[int, ...] = (0,),
    params: SamplingParams = GREEDY,
) -> Sequence:
    request = EngineRequest("r", tuple(token_ids[:prompt]), params)
    return Sequence(
        request=request,
        arrival=0,
        choice=choices[0],
        token_ids=token_ids,
        choices_to_sample=choices,
        block_table=block_table,
        num_computed_tokens=computed,
    )


class RecordingSampler(Sampler):
    """Keeps what it was asked; answers with the row's likeliest token."""

    def __init__(self) -> None:
        super().__init__(300)
        self.logits = torch.empty(0)
        self.rows: list[SampleRow] = []

    def sample(self, logits: Tensor, rows: Any) -> list[SampledToken]:
        self.logits, self.rows = logits, list(rows)
        return [SampledToken(int(logits[row.logits_row].argmax()) * 10 + row.choice) for row in rows]


@pytest.fixture
def tiny(tiny_model: Callable[..., Path]) -> TinyModel:
    return TinyModel(tiny_model("llama", seed=1), max_tokens=40)


def test_batch_packs_without_padding() -> None:
    first = sequence(list(range(100, 111)), [7, 2, 5], computed=6)
    second = sequence([50, 51, 52], [1, 9], computed=2)
    schedule = Schedule((ScheduledSequence(first, 4, False), ScheduledSequence(second, 1, True)))
    batch = build_batch(schedule, 4)
    assert batch.input_ids.tolist() == [106, 107, 108, 109, 52]
    assert batch.positions.tolist() == [6, 7, 8, 9, 2]
    assert batch.paged.cu_seqlens == (0, 4, 5)
    assert batch.paged.kv_lens == (10, 3)
    assert batch.paged.block_tables.tolist() == [[7, 2, 5], [1, 0, 0]]  # no more blocks than the tokens fill
    assert batch.paged.slot_blocks.tolist() == [2, 2, 5, 5, 1]
    assert batch.paged.slot_offsets.tolist() == [2, 3, 0, 1, 2]
    assert batch.logits_rows.tolist() == [4]


def test_logits_only_of_the_rows_that_sample(tiny: TinyModel) -> None:
    prompts = [random_prompt(n, seed=n).tolist() for n in (9, 5, 6)]
    items = tuple(
        ScheduledSequence(sequence(prompt, tiny.place().block_table), len(prompt), sample)
        for prompt, sample in zip(prompts, (True, False, True), strict=True)
    )
    sampler = RecordingSampler()
    runner = ModelRunner(tiny.config, tiny.model, tiny.memory, sampler)
    sampled = runner.execute(Schedule(items))
    assert sampler.logits.shape == (2, 300)
    assert sampler.logits.dtype == torch.float32
    expected = [TinyModel(tiny.config.path).logits(torch.tensor(prompts[i]))[-1] for i in (0, 2)]
    assert torch.equal(sampler.logits, torch.stack(expected))
    assert [[t.token_id for t in tokens] for tokens in sampled] == [
        [int(expected[0].argmax()) * 10],
        [],
        [int(expected[1].argmax()) * 10],
    ]


def test_a_trunk_samples_each_choice_from_one_row(tiny: TinyModel) -> None:
    prompt = random_prompt(6, seed=1).tolist()
    trunk = sequence(prompt, tiny.place().block_table, choices=(0, 1, 2))
    alone = sequence(prompt[:4], tiny.place().block_table, choices=(3,))
    sampler = RecordingSampler()
    sampled = ModelRunner(tiny.config, tiny.model, tiny.memory, sampler).execute(
        Schedule((ScheduledSequence(trunk, 6, True), ScheduledSequence(alone, 4, True)))
    )
    assert [(row.logits_row, row.choice, row.position, row.seed) for row in sampler.rows] == [
        (0, 0, 6, 7),
        (0, 1, 6, 7),
        (0, 2, 6, 7),
        (1, 3, 4, 7),
    ]
    assert [[t.token_id % 10 for t in tokens] for tokens in sampled] == [[0, 1, 2], [3]]


@pytest.mark.parametrize(("num_output", "suppressed"), [(0, (2, 9)), (1, (2, 9)), (2, ())])
def test_what_ends_is_suppressed_until_min_tokens(
    tiny: TinyModel, num_output: int, suppressed: tuple[int, ...]
) -> None:
    params = SamplingParams(temperature=0.0, seed=1, min_tokens=2, stop_token_ids=(9, 2))
    prompt, output = [11, 12, 13], [20, 21][:num_output]
    item = sequence([*prompt, *output], tiny.place().block_table, prompt=3, params=params)
    sampler = RecordingSampler()
    runner = ModelRunner(tiny.config, tiny.model, tiny.memory, sampler)
    runner.execute(Schedule((ScheduledSequence(item, 3 + num_output, True),)))
    (row,) = sampler.rows
    assert row.suppressed_token_ids == suppressed
    assert row.position == 3 + num_output


@pytest.mark.parametrize(
    ("penalty", "needed"),
    [({}, False), ({"repetition_penalty": 1.2}, True), ({"presence_penalty": -1.0}, True),
     ({"frequency_penalty": 0.5}, True)],
)  # fmt: skip
def test_history_is_copied_for_penalties_only(tiny: TinyModel, penalty: dict[str, float], needed: bool) -> None:
    prompt, output = [11, 12, 13], [20, 21]
    params = SamplingParams(temperature=0.0, seed=1, **penalty)  # type: ignore[arg-type]
    item = sequence([*prompt, *output], tiny.place().block_table, prompt=3, params=params)
    sampler = RecordingSampler()
    ModelRunner(tiny.config, tiny.model, tiny.memory, sampler).execute(Schedule((ScheduledSequence(item, 5, True),)))
    (row,) = sampler.rows
    expected = (prompt, output) if needed else ([], [])
    assert (list(row.prompt_token_ids), list(row.output_token_ids)) == expected


def test_copies_come_before_the_forward(tiny: TinyModel) -> None:
    """A forked sequence continues on a copy of the shared partial block; the original stays as it is."""
    tokens = random_prompt(7, seed=2)
    place = tiny.place()
    tiny.step((place, tokens[:6]))
    expected = TinyModel(tiny.config.path).logits(tokens)[-1]
    other = tiny.place().block_table
    fork = sequence(tokens.tolist(), [place.block_table[0], other[0]], computed=6)
    before = tiny.memory.buffer[place.block_table[1]].copy()
    sampler = RecordingSampler()
    runner = ModelRunner(tiny.config, tiny.model, tiny.memory, sampler)
    runner.execute(Schedule((ScheduledSequence(fork, 1, True),), copies=((place.block_table[1], other[0]),)))
    assert torch.equal(sampler.logits[0], expected)
    assert (tiny.memory.buffer[place.block_table[1]] == before).all()


def test_an_empty_schedule_copies_and_samples_nothing(tiny: TinyModel) -> None:
    tiny.memory.buffer[0] = 1
    runner = ModelRunner(tiny.config, tiny.model, tiny.memory, RecordingSampler())
    assert runner.execute(Schedule(copies=((0, 3),))) == []
    assert (tiny.memory.buffer[3] == 1).all()


def test_nothing_sampled_in_the_middle_of_a_prompt(tiny: TinyModel) -> None:
    item = sequence(random_prompt(8, seed=1).tolist(), tiny.place().block_table)
    sampler = RecordingSampler()
    runner = ModelRunner(tiny.config, tiny.model, tiny.memory, sampler)
    assert runner.execute(Schedule((ScheduledSequence(item, 5, False),))) == [[]]
    assert sampler.logits.numel() == 0


def test_numerics_class(tiny: TinyModel) -> None:
    runner = ModelRunner(tiny.config, tiny.model, tiny.memory, RecordingSampler())
    dtype, kernels, isa, parallel = runner.numerics_class.split("/")
    assert (dtype, kernels, parallel) == ("float32", "torch", "tp1")
    assert isa == torch.backends.cpu.get_cpu_capability().lower()


def test_cpu_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert set_cpu_threads(3) == 3
        assert torch.get_num_threads() == 3
        assert set_cpu_threads(0) >= 1
    finally:
        torch.set_num_threads(before)
