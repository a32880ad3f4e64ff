"""Plane NIXL under both workers: reads after the lease, reads that never end, workers without an agent."""

import asyncio
import itertools

import pytest

import pagewire.options
import transfer_svc.worker
from engine.transfer.nixl_agent import NixlAgent
from engine.transfer.nixl_posted import NixlRead
from engine.transfer.nixl_read import NixlReceiver
from engine.transfer.plane import PlaneUnavailable
from engine.transfer.shm_vm import VmReceiver
from tests.decode_svc.harness import cluster, needs_nixl, until
from tests.decode_svc.plane_faults import (
    PARAMS,
    PROMPT,
    cancel_a_decode,
    check_a_late_read,
    connect,
    own_tokens,
    plane_of,
)


def never_end(patch):
    """Reads that are posted go on for ever, as far as one is told."""
    patch.setattr(NixlRead, "done", lambda _: None)
    patch.setattr(NixlAgent, "poll", lambda *_: False)


@needs_nixl
async def test_what_lands_after_the_lease_is_not_taken(model, expected, monkeypatch):
    copy = NixlReceiver._copy

    def before_each_read(act):
        monkeypatch.setattr(NixlReceiver, "_copy", lambda *arguments: (act(), copy(*arguments)))

    async with cluster(model, plane="nixl") as workers:
        await check_a_late_read(workers, expected, before_each_read)


@needs_nixl
async def test_blocks_of_a_read_that_does_not_end_are_held_after_a_cancel(model, expected, monkeypatch):
    async with cluster(model, plane="nixl") as workers:
        await connect(workers)
        cache, quarantine = workers.decode_engine.kv_cache, workers.decode.worker._host.quarantine
        agent = workers.decode.worker.pool_server.agent
        with monkeypatch.context() as patch:
            never_end(patch)
            await cancel_a_decode(workers, lambda: agent.num_pending == 1)
            await until(lambda: quarantine.num_blocks == 7)
            await until(lambda: not workers.decode.worker.has_work)
            assert cache.num_referenced == 7, "nobody may get them: the bytes may still come"
        await until(lambda: cache.num_referenced == 0)
        assert (quarantine.num_blocks, agent.num_pending) == (0, 0)
        assert await workers.run(PROMPT, PARAMS) == [expected]


@needs_nixl
async def test_a_worker_that_stops_does_not_wait_for_a_read_that_does_not_end(model, monkeypatch):
    async with cluster(model, plane="nixl") as workers:
        await connect(workers)
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        never_end(monkeypatch)
        decoding = asyncio.create_task(workers.decode_all(request, workers.ticket))
        await until(lambda: workers.decode.worker.pool_server.agent.num_pending == 1)
        await workers.decode.stop()
        await asyncio.gather(decoding, return_exceptions=True)
        assert workers.decode_engine.kv_cache.num_referenced == 0


async def test_what_may_still_land_is_held_whatever_the_plane(model, expected, monkeypatch):
    """As above without NIXL: a read that gives up and says that it is not over."""
    over = [False]

    def give_up(receiver, blocks, addresses, landing):
        landing.leave(lambda: over[0])
        raise PlaneUnavailable("it takes too long")

    monkeypatch.setattr(VmReceiver, "read", give_up)
    async with cluster(model) as workers:
        assert await workers.run(PROMPT, PARAMS) == [expected], "over the next plane"
        quarantine, cache = workers.decode.worker._host.quarantine, workers.decode_engine.kv_cache
        assert quarantine.num_blocks == cache.num_referenced > 0
        over[0] = True
        await until(lambda: not cache.num_referenced)
        assert quarantine.num_blocks == 0


@pytest.mark.parametrize("without", [0, 1], ids=["prefill", "decode"])
async def test_without_an_agent_on_one_side_it_is_the_next_plane(model, expected, monkeypatch, caplog, without):
    monkeypatch.setattr(pagewire.options, "find_spec", lambda _: True)
    start, calls = transfer_svc.worker.start_agent, itertools.count()  # the cluster's prefill worker is the first
    monkeypatch.setattr(transfer_svc.worker, "start_agent", lambda *a: None if next(calls) == without else start(*a))
    with caplog.at_level("INFO"):
        async with cluster(model, plane="nixl") as workers:
            assert await workers.run(PROMPT, PARAMS) == [expected]
            assert (plane_of(workers), own_tokens(workers)) == ("TCP", 0)
    assert "plane TCP of NIXL, TCP, GRPC" in caplog.text


def test_the_option_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(pagewire.options, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"kv_transfer = nixl needs NIXL, which is not installed: pip install"):
        pagewire.options.WorkerConfig(role="decode", kv_transfer="nixl", engine={"model": "m"})
