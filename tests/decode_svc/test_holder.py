"""KV that a killed decode worker held is free again within two seconds; one that only lost its connection goes on."""

import asyncio
import time

import grpc
import pytest

from pagewire.v1 import transfer_pb2, transfer_pb2_grpc
from tests.decode_svc.harness import BLOCK_SIZE, Gate, cluster, greedy, random_prompt, reference, until

PROMPT, PARAMS = random_prompt(6 * BLOCK_SIZE, 1), greedy(5)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


def present(workers):
    return len(workers.prefill.worker.sender._present)


async def half_way(workers, gate):
    """A decode worker that has pulled two of six blocks while prefill still runs."""
    request = workers.request(PROMPT, PARAMS)
    prefilling = asyncio.create_task(workers.prefill_all(request))
    await until(lambda: len(workers.prefill.worker.leases) == 1)
    (ticket,) = workers.prefill.worker.leases.tickets
    decoding = asyncio.create_task(workers.decode_all(request, ticket.name))
    gate.let()
    await until(lambda: workers.decode_engine.kv_cache.num_cached == 2)
    await until(lambda: present(workers) == 1)
    return prefilling, decoding


async def test_a_killed_holder_is_noticed_by_its_connection(model):
    """The channel breaks without a word, as when the process dies; the lease would last for 30 s."""
    async with cluster(model) as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        peer = await workers.decode.worker.peers.get(
            workers.prefill.description.endpoint, workers.prefill.description.incarnation
        )
        await until(lambda: present(workers) == 1)
        await peer.attach(workers.ticket)
        assert workers.prefill_engine.kv_cache.num_referenced == 6
        broke_at = time.monotonic()
        peer.held.clear()
        workers.decode.worker.peers.put_back(peer)
        await workers.decode.worker.peers.stop()
        await until(lambda: workers.prefill_engine.kv_cache.num_referenced == 0)
        print(f"KV of a lost holder reclaimed after {time.monotonic() - broke_at:.2f} s")
        assert workers.value(workers.prefill, "pagewire:leases_deserted_total") == 1
        assert present(workers) == 0


async def test_a_holder_whose_connection_broke_goes_on(model, monkeypatch):
    """Its stream ends and is opened again at once: the ticket lives."""
    async with cluster(model, prefill_options={"max_num_batched_tokens": 2 * BLOCK_SIZE}) as workers:
        gate = Gate(workers.prefill_engine)
        prefilling, decoding = await half_way(workers, gate)
        transfers = workers.prefill.transfers
        old, transfers._closed = transfers._closed, asyncio.Event()
        leases, breaks = workers.prefill.worker.leases, []
        holder_left = leases.holder_left
        monkeypatch.setattr(leases, "holder_left", lambda *what: (breaks.append(what), holder_left(*what)))
        monkeypatch.setattr(leases, "heartbeat", lambda *_: [])  # which would do, too
        (ticket,) = leases.tickets
        old.set()
        await until(lambda: breaks)
        await until(lambda: ticket.holder_left_at is None and present(workers) == 1)
        gate.open()
        await prefilling
        assert await decoding == [reference(model, [(PROMPT, PARAMS)])[0][0][1:]]
        assert workers.value(workers.prefill, "pagewire:leases_deserted_total") == 0


async def test_the_stream_says_at_once_that_it_stands_and_ends_with_the_worker(model):
    async with cluster(model) as workers:
        stub = transfer_pb2_grpc.KvTransferServiceStub(
            workers.decode.server.open_channel(workers.prefill.description.endpoint)
        )
        call = stub.Hold(transfer_pb2.HoldRequest(worker_id="x", incarnation=7))
        assert isinstance(await call.read(), transfer_pb2.HoldResponse)
        assert present(workers) == 1
        workers.prefill.transfers.close()
        assert await call.read() is grpc.aio.EOF
        await until(lambda: present(workers) == 0)


async def test_a_decode_worker_that_lost_its_reaper_does_not_limp_on(model, monkeypatch, caplog):
    """What it has lent would never be free again."""
    async with cluster(model) as workers:
        monkeypatch.setattr(workers.decode.worker.sender, "reap", lambda **_: 1 // 0)
        await until(lambda: workers.decode_engine.death.done())
        assert isinstance(workers.decode_engine.death.exception(), ZeroDivisionError)
        assert "task lease-reaper cannot go on" in caplog.text


async def test_an_aborted_reservation_leaves_nothing_to_the_reaper(model):
    """The client goes while decode waits for prefill's blocks: reservation, blocks and ticket end at once."""
    async with cluster(model, prefill_options={"max_num_batched_tokens": 2 * BLOCK_SIZE}) as workers:
        gate = Gate(workers.prefill_engine)
        prefilling, decoding = await half_way(workers, gate)
        assert len(workers.decode.worker.reservations) == 1
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        await until(lambda: not len(workers.decode.worker.reservations))
        await until(lambda: not workers.decode_engine.kv_cache.num_referenced)
        assert not workers.decode_engine.death.done()
        gate.open()
        await prefilling
        await until(lambda: not len(workers.prefill.worker.leases))
