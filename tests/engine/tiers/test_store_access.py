"""A store that fails is left alone, each time for longer, until it has done something useful."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.tiers import store_access
from engine.tiers.store_access import StoreAccess, TooSlow
from kvstore.block_store import StoreError
from kvstore.redis_connection import RedisTarget
from kvstore.redis_store import RedisBlockStore


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(store_access, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def make_access() -> StoreAccess:
    return StoreAccess(RedisBlockStore(RedisTarget.parse("redis://h"), b"f" * 32, 1))


async def answer() -> int:
    return 1


async def pause_after(access: StoreAccess, clock: Clock, *, load: bool) -> int:
    """Whole seconds for which it is left alone after it has not answered."""
    began = clock.now
    ask = access.ask_for_load if load else access.ask
    with pytest.raises(TooSlow if load else StoreError, match="did not answer in"):
        await ask(asyncio.Event().wait(), 0.0)
    if load:
        access.note_late()
    while access.is_slow or access.is_away:
        assert access.is_away is not load
        clock.now += 0.5
    return round(clock.now - began)


@pytest.mark.parametrize("load", [True, False])
async def test_a_quick_answer_does_not_end_the_growth_of_pauses(load: bool, clock: Clock) -> None:
    access = make_access()
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        assert await pause_after(access, clock, load=load) == seconds
        assert await access.ask(answer(), 60.0) == 1
    access.note_put()
    assert await pause_after(access, clock, load=load) == (30 if load else 1)
    access.note_load()
    assert await pause_after(access, clock, load=load) == 1


async def test_a_load_that_has_no_more_time_is_no_failure(clock: Clock) -> None:
    access = make_access()
    with pytest.raises(TooSlow):
        await access.ask_for_load(asyncio.Event().wait(), 0.0)
    assert (access.num_failed, access.is_away) == (0, False)
