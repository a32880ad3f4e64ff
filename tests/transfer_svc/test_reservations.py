"""The oldest transfer always gets on, the youngest gives way, and nobody waits for ever."""

import asyncio

import pytest

from engine.kv_cache import KvCache
from kvstore.block_pool import BlockPool
from transfer_svc.reservations import PoolFull, Preempted, Reservations


class Books:
    """Reservations over a pool of `num_blocks`."""

    def __init__(self, num_blocks: int, timeout: float = 5.0) -> None:
        self.cache = KvCache(BlockPool(num_blocks), b"r" * 32, 4)
        self._changed = asyncio.Event()
        self.num_running = 0
        self.reservations = Reservations(self.cache, self._wait, lambda: self.num_running, timeout)

    async def _wait(self) -> None:
        await self._changed.wait()

    def release(self, block_ids: list[int]) -> None:
        self.cache.release(block_ids)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def test_takes_what_there_is():
    books = Books(3)
    mine = books.reservations.open()
    assert len(await books.reservations.allocate(mine, 2)) == 2
    assert len(await books.reservations.allocate(mine, 5)) == 1
    books.reservations.close(mine)
    assert not len(books.reservations)


async def test_two_transfers_that_fill_the_pool_both_end():
    books = Books(4)
    finished = []

    async def transfer(name: str, need: int) -> None:
        mine, held = books.reservations.open(), []
        while len(held) < need:
            try:
                async with mine.preemptible():
                    while len(held) < need:
                        held += await books.reservations.allocate(mine, 1)
                        await asyncio.sleep(0)
            except Preempted:
                books.release(held)
                held = []
                await books.reservations.wait_for_turn(mine)
        finished.append(name)
        await asyncio.sleep(0.01)
        books.reservations.close(mine)
        books.release(held)

    await asyncio.wait_for(asyncio.gather(transfer("old", 4), transfer("middle", 3), transfer("young", 4)), 5)
    assert finished == ["old", "middle", "young"]
    assert books.cache.num_referenced == 0


async def test_who_never_waits_takes_nothing_from_others_and_gives_way():
    """A fetch is only a wish: it fails when the pool is full, and its blocks go to a transfer that came later."""
    books = Books(2)
    fetch = books.reservations.open(timeout=0.0)
    late = books.reservations.open("tenant", 100)
    assert len(await books.reservations.allocate(late, 1)) == 1
    held = await books.reservations.allocate(fetch, 1)
    with pytest.raises(PoolFull):
        await books.reservations.allocate(fetch, 1)
    assert not late.is_preempted

    async def hold() -> None:
        async with fetch.preemptible():
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    more = asyncio.create_task(books.reservations.allocate(late, 1))
    with pytest.raises(Preempted):
        await asyncio.wait_for(holding, 5)
    books.reservations.close(fetch)
    books.release(held)
    assert len(await asyncio.wait_for(more, 5)) == 1


async def test_the_youngest_is_interrupted_wherever_it_waits():
    books = Books(1)
    old, young = books.reservations.open(), books.reservations.open()
    interrupted = asyncio.Event()

    async def hold() -> None:
        held = await books.reservations.allocate(young, 1)
        with pytest.raises(Preempted):
            async with young.preemptible():
                await asyncio.sleep(60)
        interrupted.set()
        books.release(held)

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    async with asyncio.timeout(60), old.preemptible():
        assert len(await books.reservations.allocate(old, 1)) == 1
    assert interrupted.is_set()
    await holding


async def test_a_preemption_that_finds_no_scope_is_not_lost():
    books = Books(1)
    mine = books.reservations.open()
    mine.preempt()
    with pytest.raises(Preempted):
        async with mine.preemptible():
            pytest.fail("the body must not run")


async def test_a_timeout_of_the_body_is_no_preemption():
    books = Books(1)
    mine = books.reservations.open()
    with pytest.raises(TimeoutError):
        async with mine.preemptible():
            raise TimeoutError


async def test_waiting_is_bounded():
    books = Books(1, timeout=0.05)
    mine = books.reservations.open()
    assert books.cache.allocate(1) is not None
    with pytest.raises(PoolFull):
        await books.reservations.allocate(mine, 1)
    assert not mine.is_waiting


async def test_nobody_overtakes_an_older_transfer_that_waits():
    books = Books(1)
    (taken,) = books.cache.allocate(1) or ()
    old, young = books.reservations.open(), books.reservations.open()
    second = asyncio.create_task(books.reservations.allocate(young, 1))
    first = asyncio.create_task(books.reservations.allocate(old, 1))
    await asyncio.sleep(0.01)
    books.release([taken])
    await asyncio.sleep(0.01)
    assert first.done()
    assert not second.done()
    books.release(await first)
    await asyncio.wait_for(second, 5)


async def test_running_sequences_keep_room_to_grow():
    books = Books(5)
    books.num_running = 2
    mine = books.reservations.open()
    assert len(await books.reservations.allocate(mine, 9)) == 3
    assert not books.reservations.has_room(mine)
    books.num_running = 0
    assert len(await books.reservations.allocate(mine, 9)) == 2


async def test_a_flood_of_transfers_does_not_hold_up_another_tenant():
    books, order = Books(1), []

    async def transfer(name: str, tenant: str) -> None:
        mine = books.reservations.open(tenant, 4)
        async with mine.preemptible():
            held = await books.reservations.allocate(mine, 1)
        order.append(name)
        await asyncio.sleep(0.01)
        books.reservations.close(mine)
        books.release(held)

    flood = [asyncio.create_task(transfer(f"A{number}", "A")) for number in range(4)]
    await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*flood, transfer("B", "B")), 20)
    assert order == ["A0", "B", "A1", "A2", "A3"]
