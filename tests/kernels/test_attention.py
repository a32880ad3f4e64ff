"""Paged attention against dense softmax attention in float64, and bit for bit against itself in other chunks."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.paged import PagedBatch, plan_attention, split_size
from tests.kernels.kernel_sets import DTYPES, KERNEL_SETS, RELATIVE

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """One attention layer; the last field caps scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 16
    window: int | None = None
    cap: float | None = None


CASES = {
    "multi-head": Case(3, 3),
    "grouped": Case(4, 2),
    "multi-query": Case(4, 1),
    "a group of 6": Case(6, 1),
    "more heads than a tile has rows": Case(24, 2, head_dim=8),
    "window": Case(4, 2, window=19),
    "window of a block": Case(4, 2, window=4),
    "window of one": Case(2, 1, window=1),
    "soft cap": Case(4, 2, cap=1.5),
    "window and cap": Case(4, 1, window=70, cap=1.5),
}


class Sequence:
    """Random q, k and v of a sequence, and its place in the cache."""

    def __init__(self, case: Case, length: int, block_table: list[int], dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = (torch.randn(length, case.num_heads, case.head_dim, generator=generator) * 2).to(dtype)
        self.k = (torch.randn(length, case.num_kv_heads, case.head_dim, generator=generator) * 2).to(dtype)
        self.v = torch.randn(length, case.num_kv_heads, case.head_dim, generator=generator).to(dtype)
        self.block_table = block_table

    def dense(self, case: Case) -> Tensor:
        """Attention with an explicit mask, in float64."""
        length, group = self.q.shape[0], case.num_heads // case.num_kv_heads
        k = self.k.double().repeat_interleave(group, dim=1).transpose(0, 1)
        v = self.v.double().repeat_interleave(group, dim=1).transpose(0, 1)
        scores = self.q.double().transpose(0, 1) @ k.transpose(1, 2) * SCALE
        if case.cap is not None:
            scores = torch.tanh(scores / case.cap) * case.cap
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (case.window or length))
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def run(
    kernels: str, case: Case, sequences: list[Sequence], ranges: list[tuple[int, int]], block_size: int, caches: Tensor
) -> Tensor:
    """Compute tokens begin : end of each sequence; what lies before is in the cache already."""
    kernel_set = KERNEL_SETS[kernels]
    query_lens, kv_lens = [end - begin for begin, end in ranges], [end for _, end in ranges]
    batch = PagedBatch.build(query_lens, kv_lens, [s.block_table for s in sequences], block_size)
    pieces = [slice(begin, end) for begin, end in ranges]
    q, k, v = (
        torch.cat([getattr(s, name)[piece] for s, piece in zip(sequences, pieces, strict=True)]) for name in "qkv"
    )
    kernel_set.write_kv(k, v, caches[0], caches[1], batch)
    plan = plan_attention(batch, group_size=case.num_heads // case.num_kv_heads, window=case.window)
    return kernel_set.paged_attention(q, caches[0], caches[1], plan, scale=SCALE, cap=case.cap)


def caches_for(case: Case, num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """K and V of one layer, as strided as in the pool, filled with what must not be seen."""
    shape = (num_blocks, 3, 2, case.num_kv_heads, block_size, case.head_dim)
    return torch.full(shape, 1e4, dtype=dtype)[:, 1].transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("name", CASES)
def test_against_dense_attention(name: str, kernels: str, dtype: str) -> None:
    case = CASES[name]
    lengths = [1, 13, 70]
    tables = [[9], [3, 1, 8, 5], list(range(10, 28))]
    sequences = [Sequence(case, n, t, DTYPES[dtype], seed=n) for n, t in zip(lengths, tables, strict=True)]
    caches = caches_for(case, 30, 4, DTYPES[dtype])
    out = run(kernels, case, sequences, [(0, n) for n in lengths], 4, caches)
    expected = torch.cat([s.dense(case) for s in sequences])
    # Sums of weights times values of size about 3; scores of size about 10 carry their own rounding in float32.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=10 * RELATIVE[DTYPES[dtype]])


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("window", [None, 19])
def test_what_others_left_in_the_pool_is_not_seen_even_if_it_is_not_finite(window: int | None, kernels: str) -> None:
    """NaN in block 0, to which a table's padding points, in other blocks and in the rest of a sequence's last block."""
    case = Case(4, 2, window=window)
    sequences = [Sequence(case, 70, list(range(1, 19)), torch.float32, seed=1),
                 Sequence(case, 9, [20, 21, 22], torch.float32, seed=2)]  # fmt: skip
    ranges = [(0, 70), (0, 9)]
    caches = caches_for(case, 30, 4, torch.float32)
    expected = run(kernels, case, sequences, ranges, 4, caches)
    assert torch.equal(run(kernels, case, sequences, ranges, 4, torch.full_like(caches, float("nan"))), expected)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("window", [None, 19, 300])
def test_chunks_neighbours_and_blocks_change_nothing(
    window: int | None, kernels: str, dtype: str, block_size: int
) -> None:
    """The whole prompt at once, against odd chunks and single tokens beside others, in other blocks; bit for bit."""
    case = Case(4, 2, window=window)
    length = 530  # three splits of 256
    num_blocks = -(-length // block_size)
    whole = Sequence(case, length, list(range(num_blocks)), DTYPES[dtype], seed=1)
    expected = run(
        kernels, case, [whole], [(0, length)], block_size, caches_for(case, num_blocks, block_size, whole.q.dtype)
    )

    other = Sequence(case, 40, list(range(num_blocks, num_blocks + 10)), DTYPES[dtype], seed=2)
    moved = Sequence(case, length, list(range(num_blocks + 10, 2 * num_blocks + 10))[::-1], DTYPES[dtype], seed=1)
    caches = caches_for(case, 2 * num_blocks + 10, block_size, whole.q.dtype)
    begin, others = 0, 0
    for size in [1, 3, 7, 16, 100, 129, 1, 1, 64, 150, 55, 1, 1, 1]:
        end = begin + size
        if others < 40:
            out = run(kernels, case, [other, moved], [(others, others + 5), (begin, end)], block_size, caches)[5:]
            others += 5
        else:
            out = run(kernels, case, [moved], [(begin, end)], block_size, caches)
        assert torch.equal(out, expected[begin:end]), f"tokens {begin} to {end}"
        begin = end
    assert begin == length


def test_a_hidden_split_leaves_no_trace() -> None:
    """A tile whose rows begin in different splits: rows that see nothing of the first split must not notice it."""
    case = Case(2, 1, window=256)
    tokens = 520
    sequence = Sequence(case, tokens, list(range(130)), torch.float32, seed=3)
    caches = caches_for(case, 130, 4, torch.float32)
    run("torch", case, [sequence], [(0, 510)], 4, caches)
    together = run("torch", case, [sequence], [(510, tokens)], 4, caches)
    alone = [run("torch", case, [sequence], [(i, i + 1)], 4, caches) for i in range(510, tokens)]
    assert torch.equal(together, torch.cat(alone))


def test_write_kv_fills_only_its_slots() -> None:
    case = Case(2, 2, head_dim=8)
    caches = caches_for(case, 4, 4, torch.float32)
    sequence = Sequence(case, 6, [2, 0], torch.float32, seed=1)
    run("torch", case, [sequence], [(0, 6)], 4, caches)
    assert torch.equal(caches[0][2], sequence.k[:4].transpose(0, 1))
    assert torch.equal(caches[1][0][:, :2], sequence.v[4:].transpose(0, 1))
    assert (caches[:, 0, :, 2:] == 1e4).all()
    assert (caches[:, [1, 3]] == 1e4).all()


def test_split_size_is_whole_blocks() -> None:
    assert [split_size(size) for size in (1, 4, 16, 48, 256, 500)] == [256, 256, 256, 240, 256, 500]


@pytest.mark.parametrize(("query_len", "kv_len", "table"), [(0, 4, [0]), (5, 4, [0, 1]), (1, 9, [0, 1])])
def test_a_sequence_that_does_not_fit_is_refused(query_len: int, kv_len: int, table: list[int]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        PagedBatch.build([query_len], [kv_len], [table], 4)
