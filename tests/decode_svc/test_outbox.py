"""One batch per step for a reader that keeps up, several steps in one for others, and a limit."""

import asyncio

import pytest

from decode_svc.outbox import Outbox
from engine.request import TokenOutput
from pagewire.errors import Internal, ResourceExhausted


def token(index: int) -> TokenOutput:
    return TokenOutput("r", 0, index, 7)


async def test_a_step_is_one_batch():
    outbox = Outbox()
    outbox.add(1, token(0))
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done(), "the step is not over"
    outbox.add(2, token(0))
    outbox.accept(3, 4)
    outbox.flush()
    batch = await taking
    assert batch is not None
    assert [handle for handle, _ in batch.tokens] == [1, 2]
    assert batch.accepted == [(3, 4)]


async def test_a_slow_reader_gets_several_steps_at_once_and_the_rest_after_close():
    outbox = Outbox()
    for index in range(3):
        outbox.add(1, token(index))
        outbox.flush()
    batch = await outbox.take()
    assert batch is not None
    assert [t.index for _, t in batch.tokens] == [0, 1, 2]
    outbox.fail(1, Internal("x"))
    outbox.close()
    batch = await outbox.take()
    assert batch is not None
    assert len(batch.failures) == 1
    assert await outbox.take() is None


async def test_a_reader_that_is_too_slow_is_told_so():
    outbox = Outbox(max_pending_tokens=2)
    for index in range(3):
        outbox.add(1, token(index))
        outbox.flush()
    with pytest.raises(ResourceExhausted, match="too slow"):
        await outbox.take()
