"""Recording ops: they run again with other rows and inputs, memory is used again, and nothing else gets in."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.native import NativeKernels
from kernels.cpu.packed import PackedWeight
from kernels.cpu.recording import Arena, RecordedStep, Unrecordable
from kernels.cpu.recording import record as record_ops
from kernels.grouped import GroupedMatrix
from tests.kernels.cpu.harness import assert_same_bits, kernels_for, normal

ROWS = 12


@pytest.fixture
def native() -> NativeKernels:
    return kernels_for("avx2")


@pytest.fixture
def table(native: NativeKernels) -> PackedWeight:
    return native.pack(normal(50, 64, dtype=torch.bfloat16, seed=1))


def record(native: NativeKernels, table: PackedWeight, run: Callable[[Tensor], Tensor]) -> RecordedStep:
    """`run` gets embedded rows [ROWS, 64]."""
    ids = torch.zeros(ROWS, dtype=torch.int64)
    return native.record(ROWS, [ids], lambda: run(native.embedding(ids, table)))


def test_other_rows_and_other_ids(native: NativeKernels) -> None:
    table, weight = (native.pack(normal(n, 64, dtype=torch.bfloat16, seed=n)) for n in (50, 80))
    norm = normal(64, dtype=torch.bfloat16, seed=3)

    def compute(ids: Tensor) -> Tensor:
        x = native.embedding(ids, table)
        return native.linear(native.add(x, native.rms_norm(x, norm, 1e-6)), weight)

    recorded_ids = torch.zeros(ROWS, dtype=torch.int64)
    step = native.record(ROWS, [recorded_ids], lambda: compute(recorded_ids))
    assert step.num_ops == 4
    for num_rows in (1, ROWS, 5):
        ids = torch.arange(num_rows) * 3
        result = step.run(num_rows, num_rows, [ids])
        assert_same_bits(result, compute(ids))
        kept = result.clone()
        step.run(num_rows, num_rows, [ids + 1])
        assert_same_bits(result, kept)  # it is the caller's own
    for num_rows in (0, ROWS + 1):
        with pytest.raises(ValueError, match="max_rows"):
            step.run(num_rows, 1, [recorded_ids])
    with pytest.raises(ValueError, match="other inputs"):
        step.run(1, 1, [])
    with pytest.raises(IndexError, match="from 0 to 49"):
        step.run(1, 1, [torch.tensor([50])])


def test_nothing_runs_while_recording(native: NativeKernels, table: PackedWeight) -> None:
    target = torch.zeros(ROWS, 64, dtype=torch.bfloat16)

    def run(x: Tensor) -> Tensor:
        native._ops.add(1, x.data_ptr(), 64, x.data_ptr(), 64, target.data_ptr(), ROWS, 64)
        return x

    record(native, table, run).run(2, 2, [torch.tensor([1, 2])])
    assert target[:2].any()
    assert not target[2:].any()


@pytest.mark.parametrize(
    "run",
    [
        lambda native, x: x + 1,
        lambda native, x: x.contiguous().clone(),
        lambda native, x: x.t().contiguous(),
        lambda native, x: native.add(x, x.float().bfloat16()),
        lambda native, x: x.mul_(2),
        lambda native, x: x.index_select(1, torch.arange(64)),
        lambda native, x: torch.zeros_like(x),
        lambda native, x: torch.tensor([[1.0] * 64] * ROWS),
        lambda native, x: x if int(x.max()) else x[:1],
        lambda native, x: x[: len(x.tolist())],
        lambda native, x: x[: len(x.view(torch.int16).numpy())],
        lambda native, x: x[: len(np.asarray(x.view(torch.int16)))],
        lambda native, x: x[x.sum() > 0],
        lambda native, x: native.add(x[:4], x[:4]),
        lambda native, x: x[:4],
        lambda native, x: native.soft_cap(x, 2.0),
    ],
)
def test_what_else_is_computed_is_refused(
    native: NativeKernels, table: PackedWeight, run: Callable[..., Tensor]
) -> None:
    with pytest.raises(Unrecordable):
        record(native, table, lambda x: run(native, x))
    x = normal(3, 64, dtype=torch.bfloat16, seed=1)
    assert torch.equal(native.add(x, x), x + x)  # the thread records no longer


def test_an_interrupted_record_is_at_an_end(native: NativeKernels) -> None:
    """Even where the interrupt comes as it begins."""
    programs: list[Any] = []

    def program_of(max_rows: int, inputs: list[int]) -> SimpleNamespace:
        programs.append(program := native._ops.Program(max_rows, inputs))

        def begin() -> None:
            program.begin()
            raise KeyboardInterrupt

        return SimpleNamespace(begin=begin, end=program.end)

    ops = SimpleNamespace(Program=program_of, Unrecordable=native._ops.Unrecordable)
    try:
        with pytest.raises(KeyboardInterrupt):
            record_ops(ops, ROWS, [], lambda: torch.empty(ROWS, 1))
        x = normal(3, 64, dtype=torch.bfloat16, seed=1)
        assert torch.equal(native.add(x, x), x + x)
    finally:
        programs[0].end()


def test_ops_of_other_places_in_a_model(native: NativeKernels) -> None:
    """Those that no model of `tests/engine/test_step_replay.py` has."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-127, 128, (50, 64), generator=generator).char()
    scales = torch.rand(50, 2, generator=generator)
    table = native.pack_groups(GroupedMatrix("int8", numbers, scales, 32, None, None), dtype=torch.bfloat16)

    def compute(ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = native.embedding(ids, table)
        turned = native.apply_rope(x.view(-1, 2, 32), cos, sin).view(-1, 64)
        return native.silu_and_mul(turned, native.gelu_tanh_and_mul(x, turned))

    recorded = [torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, 16), torch.zeros(ROWS, 16)]
    step = native.record(ROWS, recorded, lambda: compute(*recorded))
    assert step.num_ops == 4
    for num_rows in (1, ROWS, 7):
        ids = torch.randint(0, 50, (num_rows,), generator=generator)
        cos, sin = torch.rand(2, num_rows, 16, generator=generator)
        assert_same_bits(step.run(num_rows, num_rows, [ids, cos, sin]), compute(ids, cos, sin))


def test_inputs_are_known(native: NativeKernels, table: PackedWeight) -> None:
    ids = torch.zeros(ROWS, dtype=torch.int64)
    others = ids.clone()
    with pytest.raises(Unrecordable, match="none of its inputs"):
        native.record(ROWS, [ids], lambda: native.embedding(others, table))
    x = torch.zeros(ROWS, 64, dtype=torch.bfloat16)
    with pytest.raises(Unrecordable, match="as something else"):
        native.record(ROWS, [x], lambda: native.add(x, x))


def test_views_and_new_tensors_are_allowed(native: NativeKernels, table: PackedWeight) -> None:
    step = record(native, table, lambda x: native.add(x.view(ROWS, 8, 8).view(ROWS, -1)[:, :64], x.reshape(ROWS, 64)))
    ids = torch.tensor([4, 5])
    assert step.run(2, 2, [ids]).shape == (2, 64)


def test_memory_is_used_again(native: NativeKernels, table: PackedWeight) -> None:
    """A chain of any length needs two places, each as large as it has ever been."""

    def chain(length: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for _ in range(length):
                x = native.add(x, x)
            return x

        return run

    sizes = {length: record(native, table, chain(length)).num_bytes for length in (2, 20)}
    assert sizes[2] == sizes[20] <= 3 * ROWS * 64 * 2
    result = record(native, table, chain(5)).run(1, 1, [torch.tensor([3])])
    assert_same_bits(result, normal(50, 64, dtype=torch.bfloat16, seed=1)[3:4] * 32)


def test_an_arena_gives_no_place_away_that_is_in_use() -> None:
    arena = Arena()
    first = arena.empty((4, 8), torch.float32)
    second = arena.empty((4, 8), torch.float32)
    view = first[1:]
    addresses = {first.data_ptr(), second.data_ptr()}
    del first
    gc.collect()
    third = arena.empty((4, 8), torch.float32)
    assert third.data_ptr() not in addresses
    where = second.data_ptr()
    del second
    assert arena.empty((2, 4), torch.bfloat16).data_ptr() == where
    assert view.data_ptr() % 32 == 0
    assert arena.num_bytes == 3 * 4 * 8 * 4


def test_a_thread_records_one_step(native: NativeKernels) -> None:
    ops: Any = native._ops
    program = ops.Program(ROWS, [])
    program.begin()
    with pytest.raises(RuntimeError, match="records already"):
        ops.Program(ROWS, []).begin()
    del program
    gc.collect()
    x = normal(3, 64, dtype=torch.bfloat16, seed=1)
    assert torch.equal(native.add(x, x), x + x)
