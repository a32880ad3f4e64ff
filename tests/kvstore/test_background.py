"""Work that must end although its task is cancelled, more than once."""

import asyncio

import pytest

from kvstore.background import end_tasks, to_the_end


async def test_what_must_end_is_not_cut_short_by_being_cancelled_again() -> None:
    steps: list[str] = []

    async def close() -> None:
        await asyncio.sleep(0.3)  # end_tasks cancels each 50 ms
        steps.append("closed")

    async def serve() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await to_the_end(close())

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    await end_tasks(task)
    assert steps == ["closed"]
    assert task.cancelled()


async def test_its_error_is_raised() -> None:
    async def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await to_the_end(fail())
