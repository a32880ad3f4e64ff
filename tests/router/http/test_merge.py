"""Several streams as one: nothing lost, order kept in each, the first error ends all, a slow reader is waited for."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from router.http.merge import Numbered, merge


class Source:
    """Numbers up to `count`, then maybe an error; knows how far it was read and that it was closed."""

    def __init__(self, count: int, error: Exception | None = None, delay: float = 0.0) -> None:
        self.count, self.error, self.delay = count, error, delay
        self.num_given = 0
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int]:
        try:
            for number in range(self.count):
                await asyncio.sleep(self.delay)
                self.num_given += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("counts", [(3,), (3, 0, 5, 1)])
async def test_everything_comes_in_order(counts: tuple[int, ...]) -> None:
    sources = [Source(count) for count in counts]
    async with aclosing(merge([source.stream() for source in sources])) as items:
        got: list[Numbered[int]] = [item async for item in items]
    for number, count in enumerate(counts):
        assert [item.item for item in got if item.stream == number] == list(range(count))
    assert all(source.is_closed for source in sources)


async def test_the_first_error_ends_all() -> None:
    sources = [Source(1000, delay=0.01), Source(2, ValueError("mine"))]
    with pytest.raises(ValueError, match="mine"):
        async for _ in merge([source.stream() for source in sources]):
            pass
    assert all(source.is_closed for source in sources)


async def test_closing_it_closes_them_and_nobody_runs_ahead() -> None:
    sources = [Source(1000) for _ in range(3)]
    async with aclosing(merge([source.stream() for source in sources])) as items:
        for _ in range(10):
            await anext(items)
        await asyncio.sleep(0.01)
    assert sum(source.num_given for source in sources) <= 10 + 1 + len(sources)
    assert all(source.is_closed for source in sources)
