"""Faults that every plane may meet: a prompt of several blocks, and the moments at which things go wrong."""

import asyncio
from collections.abc import Callable

from tests.decode_svc.harness import BLOCK_SIZE, Cluster, greedy, random_prompt, until

PROMPT, PARAMS = random_prompt(6 * BLOCK_SIZE + 2, 1), greedy(6)


def own_tokens(workers: Cluster) -> float:
    """Prompt tokens that the decode worker computed by itself."""
    return workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total")


def failures(workers: Cluster, reason: str) -> float:
    """Transfers to the decode worker that failed for this reason."""
    return workers.value(workers.decode, "pagewire:transfer_failures_total", reason=reason)


def plane_of(workers: Cluster) -> str:
    """The plane that the decode worker pulls over."""
    (peer,) = workers.decode.worker.peers.connected()
    return peer.plane.name


async def connect(workers: Cluster) -> None:
    """Lets the decode worker choose its plane, with another prompt."""
    await workers.run(random_prompt(5, 3), PARAMS)


async def check_a_late_read(
    workers: Cluster, expected: list[int], before_each_read: Callable[[Callable[[], None]], None]
) -> None:
    """The ticket ends and its blocks are given to somebody else, between the descriptors and the read: not taken.

    `before_each_read(act)` has the receiver call `act()` on its thread before it reads.
    """
    cache, memory = workers.prefill_engine.kv_cache, workers.prefill_engine.memory
    loop = asyncio.get_running_loop()

    async def end_the_lease() -> None:
        workers.prefill.worker.sender.drop(workers.ticket, "its lease expired")
        cache.reset()
        others = cache.allocate(cache.num_free)
        memory.buffer[others] += 1
        cache.release(others)

    request = workers.request(PROMPT, PARAMS)
    await workers.prefill_all(request)
    before_each_read(lambda: asyncio.run_coroutine_threadsafe(end_the_lease(), loop).result(30))
    assert await workers.decode_all(request, workers.ticket) == [expected]
    assert own_tokens(workers) == len(PROMPT), "nothing of it was used"
    failed = {reason: failures(workers, reason) for reason in ("generation", "ticket", "checksum")}
    assert failed == {"generation": 1, "ticket": 1, "checksum": 0}


async def cancel_a_decode(workers: Cluster, when: Callable[[], object]) -> None:
    """A decode of the prompt, cancelled as soon as `when()`."""
    request = workers.request(PROMPT, PARAMS)
    await workers.prefill_all(request)
    decoding = asyncio.create_task(workers.decode_all(request, workers.ticket))
    await until(when)
    decoding.cancel()
    await asyncio.gather(decoding, return_exceptions=True)
