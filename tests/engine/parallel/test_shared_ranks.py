"""Exchanges through shared memory: sums in the order of the ranks, to the bit, and a wait that can be given up."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from engine.parallel import shared_ranks
from engine.parallel.shared_ranks import SharedRanks, can_share, make_memory

R = TypeVar("R")
pytestmark = pytest.mark.skipif(not can_share(), reason="the native extension is not here, or older than exchanges")
_SECONDS = 60.0


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SharedRanks]]:
    """Of one process, which is all the same to the memory; the parameter is their number."""
    monkeypatch.setattr(shared_ranks, "CAPACITY", 256)
    fd = make_memory(request.param)
    yield [SharedRanks(fd, rank, request.param) for rank in range(request.param)]
    os.close(fd)


def on_each(ranks: list[SharedRanks], work: Callable[[SharedRanks], R]) -> list[R]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [each.result(_SECONDS) for each in [pool.submit(work, rank) for rank in ranks]]


def value(rank: int, number: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(size, generator=generator) * 10 ** torch.randint(-6, 6, (size,), generator=generator)


@pytest.mark.parametrize("ranks", [2, 3, 5], indirect=True)
def test_sums_are_in_the_order_of_the_ranks(ranks: list[SharedRanks]) -> None:
    """More ranks than CPUs, tensors smaller and larger than a piece, one after another without a pause."""
    sizes = [1, 64, 65, 200, 3, 1000, 128] * 20

    def work(rank: SharedRanks) -> list[torch.Tensor]:
        return [rank.sum(value(rank.rank, number, size)) for number, size in enumerate(sizes)]

    found = on_each(ranks, work)
    for number, size in enumerate(sizes):
        wanted = value(0, number, size)
        for rank in ranks[1:]:
            wanted = wanted + value(rank.rank, number, size)
        assert all(torch.equal(each[number], wanted) for each in found)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_what_is_gathered_is_in_the_order_of_the_ranks(ranks: list[SharedRanks]) -> None:
    def own(rank: int) -> torch.Tensor:
        return torch.full((5, 33), 1.0 + rank, dtype=torch.bfloat16)

    def work(rank: SharedRanks) -> tuple[torch.Tensor | None, torch.Tensor]:
        return rank.gather(own(rank.rank)), rank.gather_all(own(rank.rank).t())

    wanted = torch.stack([own(rank) for rank in range(3)])
    (first, all_of_it), *others = on_each(ranks, work)
    assert first is not None
    assert torch.equal(first, wanted)
    assert torch.equal(all_of_it, wanted.transpose(1, 2))
    assert all(gathered is None and torch.equal(each, all_of_it) for gathered, each in others)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_who_waits_for_a_rank_that_does_not_come_can_be_told(ranks: list[SharedRanks]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].sum, torch.zeros(1))
        ranks[0].give_up()
        with pytest.raises(RuntimeError, match="the exchange was given up"):
            waiting.result(_SECONDS)
    with pytest.raises(RuntimeError, match="the exchange was given up"):
        ranks[0].gather(torch.zeros(1))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_silent_rank_is_named(ranks: list[SharedRanks]) -> None:
    fd = make_memory(2)
    impatient = SharedRanks(fd, 0, 2, timeout=0.01)
    os.close(fd)
    with pytest.raises(RuntimeError, match="rank 1 has been silent for 10 ms"):
        impatient.sum(torch.zeros(1))
    with pytest.raises(ValueError, match="ranks add float32"):
        impatient.sum(torch.zeros(1, dtype=torch.bfloat16))
