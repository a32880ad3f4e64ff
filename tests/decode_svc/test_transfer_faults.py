"""Bad bytes, old epochs, dead and restarted prefill workers: the tokens stay right and everything is freed."""

import asyncio
import dataclasses
from contextlib import aclosing

import grpc
import pytest

import decode_svc.intake
import transfer_svc.client
import transfer_svc.manifest
import transfer_svc.peers
import transfer_svc.service
from engine.transfer.plane import PlaneUnavailable
from pagewire.errors import Unavailable, from_rpc_error
from pagewire.v1 import prefill_pb2, transfer_pb2, transfer_pb2_grpc
from tests.decode_svc.harness import (
    BLOCK_SIZE,
    NIXL,
    Gate,
    block_bytes,
    cluster,
    random_prompt,
    until,
)
from tests.decode_svc.plane_faults import PARAMS, PROMPT, failures, own_tokens
from transfer_svc.client import TransferClient


def bend(monkeypatch, times, change):
    """Changes the first `times` frames."""
    encode, left = transfer_svc.service.encode_frame, [times]

    def bent(frame, parts):
        if left[0] <= 0:
            return encode(frame, parts)
        left[0] -= 1
        return change(encode, frame, parts)

    monkeypatch.setattr(transfer_svc.service, "encode_frame", bent)


def flip_a_bit(encode, frame, parts):
    wire = bytearray(encode(frame, parts))
    wire[-1] ^= 1
    return bytes(wire)


def age(encode, frame, parts):
    return encode(dataclasses.replace(frame, epoch=frame.epoch + 7), parts)


def other_key(encode, frame, parts):
    return encode(dataclasses.replace(frame, keys=(b"x" * 32, *frame.keys[1:])), parts)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(flip_a_bit, "checksum"), (age, "frame"), (other_key, "key")],
    ids=("checksum", "frame", "key"),
)
async def test_bad_frames_are_noticed_and_the_rest_is_computed(model, expected, monkeypatch, change, reason):
    bend(monkeypatch, 1000, change)
    async with cluster(model, plane="grpc") as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        assert failures(workers, reason) >= 1
        assert own_tokens(workers) == len(PROMPT)


async def test_one_bad_frame_is_pulled_again(model, expected, monkeypatch):
    bend(monkeypatch, 1, flip_a_bit)
    async with cluster(model, plane="grpc") as workers:
        assert await workers.run(PROMPT, PARAMS) == [expected]
        assert failures(workers, "checksum") == 1
        assert own_tokens(workers) == 0


@pytest.mark.parametrize("plane", ["tcp", "shm_vm", NIXL])
async def test_a_wrong_checksum_is_noticed_in_the_copy(model, expected, monkeypatch, plane):
    checksum = transfer_svc.manifest.checksum
    monkeypatch.setattr(transfer_svc.manifest, "checksum", lambda data: checksum(data) ^ 1)
    async with cluster(model, plane=plane) as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        assert failures(workers, "checksum") == 3
        assert own_tokens(workers) == len(PROMPT)


async def test_large_blocks_come_in_parts(model, expected, monkeypatch):
    monkeypatch.setattr(transfer_svc.service, "FRAME_BYTES", 700)
    async with cluster(model, plane="grpc") as workers:
        assert await workers.run(PROMPT, PARAMS) == [expected]
        assert own_tokens(workers) == 0
    bend(monkeypatch, 10**6, flip_a_bit)
    async with cluster(model, plane="grpc") as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected]


async def test_a_plane_that_breaks_is_replaced_by_the_next(model, expected):
    async with cluster(model) as workers:
        assert await workers.run(PROMPT, PARAMS) == [expected]
        (peer,) = workers.decode.worker.peers.connected()
        assert peer.plane.name == "SHM_VM"

        def broken(blocks, addresses, landing):
            raise PlaneUnavailable("unplugged")

        peer.receiver.read = broken
        other = random_prompt(len(PROMPT), 2)
        await workers.run(other, PARAMS)
        assert peer.plane.name == "SHM_RING"
        assert own_tokens(workers) == 0


async def test_older_epochs_are_refused(model, expected):
    async with cluster(model) as workers, grpc.aio.insecure_channel(workers.prefill.description.endpoint) as channel:
        stub = transfer_pb2_grpc.KvTransferServiceStub(channel)
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        attach = transfer_pb2.AttachRequest(ticket=workers.ticket, worker_id="ghost", incarnation=1)
        old = (await stub.Attach(attach)).epoch
        new = (await stub.Attach(attach)).epoch
        assert new > old
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(
                aiter(
                    stub.Pull(transfer_pb2.PullRequest(ticket=workers.ticket, epoch=old, plane="TRANSFER_PLANE_GRPC"))
                )
            )
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        held = transfer_pb2.TicketEpoch(ticket=workers.ticket, epoch=old)
        assert list((await stub.Heartbeat(transfer_pb2.HeartbeatRequest(tickets=[held]))).refused) == [workers.ticket]
        release = transfer_pb2.ReleaseRequest(ticket=workers.ticket, epoch=old)
        assert not (await stub.Release(release)).released
        assert workers.prefill_engine.kv_cache.num_referenced == 7
        assert await workers.decode_all(request, workers.ticket) == [expected[1:]]


async def test_a_successor_ends_the_pull_of_its_predecessor(model):
    async with cluster(model) as workers, grpc.aio.insecure_channel(workers.prefill.description.endpoint) as channel:
        stub = transfer_pb2_grpc.KvTransferServiceStub(channel)
        gate = Gate(workers.prefill_engine)
        request = workers.request(PROMPT, PARAMS)
        prefill = aiter(workers.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True)))
        ticket = (await anext(prefill)).accepted.ticket
        attach = transfer_pb2.AttachRequest(ticket=ticket, worker_id="ghost", incarnation=1)
        epoch = (await stub.Attach(attach)).epoch
        pull = aiter(stub.Pull(transfer_pb2.PullRequest(ticket=ticket, epoch=epoch, plane="TRANSFER_PLANE_GRPC")))
        waiting = asyncio.ensure_future(anext(pull))
        await asyncio.sleep(0.05)
        await stub.Attach(attach)
        with pytest.raises(grpc.aio.AioRpcError, match="epoch 1 is over"):
            await waiting
        gate.open()
        assert [event async for event in prefill][-1].HasField("first_tokens")
        workers.prefill.worker.release_ticket(ticket)


async def test_prefill_dies_in_the_middle_of_a_pull(model, expected):
    options = {"max_num_batched_tokens": 2 * BLOCK_SIZE}
    async with cluster(model, prefill_options=options) as workers:
        gate = Gate(workers.prefill_engine)
        request = workers.request(PROMPT, PARAMS)
        prefill = aiter(workers.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True)))
        ticket = (await anext(prefill)).accepted.ticket
        decoding = asyncio.create_task(workers.decode_all(request, ticket))
        gate.let()
        await until(lambda: workers.decode_engine.kv_cache.num_cached == 2)
        await workers.prefill.server.server.stop(None)
        gate.open()
        assert await decoding == [expected], "all of it comes from decode, the first token included"
        assert own_tokens(workers) == len(PROMPT) - 2 * BLOCK_SIZE, "verified blocks are kept"
        assert failures(workers, "peer") == 1


async def test_prefill_is_gone_before_the_pull(model, expected):
    async with cluster(model) as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        await workers.prefill.server.server.stop(None)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        assert failures(workers, "peer") == 1
        workers.prefill.worker.release_ticket(workers.ticket)


async def test_another_incarnation_at_the_endpoint_is_not_the_peer(model, expected):
    async with cluster(model) as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        description = workers.prefill.description
        workers.prefill.description = dataclasses.replace(description, incarnation=description.incarnation + 2)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        assert failures(workers, "peer") == 1
        await until(lambda: not len(workers.decode.worker.peers))  # a handshake may just be refused: to give it back
        workers.prefill.description = description
        workers.prefill.worker.release_ticket(workers.ticket)


async def test_workers_that_do_not_fit_say_so(model, tiny_model):
    async with cluster(model, decode_options={"block_size": 8}) as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await workers.decode_all(request, workers.ticket)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "block_size=4" in error.value.details()
        assert "block_size=8" in error.value.details()
        workers.prefill.worker.release_ticket(workers.ticket)


def bytes_of_kv(workers):
    return workers.value(workers.decode, "pagewire:transfer_blocks_total")


class Lossy:
    """Breaks the first `times` pulls off after one message, as a connection that is cut does."""

    def __init__(self, monkeypatch, times):
        pull = TransferClient.pull
        self.left = times

        async def lossy(client, *arguments):
            async with aclosing(pull(client, *arguments)) as events:
                async for event in events:
                    yield event
                    if self.left > 0:
                        self.left -= 1
                        raise Unavailable("Socket closed")

        monkeypatch.setattr(TransferClient, "pull", lossy)
        monkeypatch.setattr(decode_svc.intake, "RETRY_SECONDS", 0.01)


async def test_a_broken_connection_is_tried_again(model, expected, monkeypatch):
    Lossy(monkeypatch, 2)
    monkeypatch.setattr(transfer_svc.service, "FRAME_BYTES", block_bytes(model, BLOCK_SIZE))
    async with cluster(model, plane="grpc") as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected[1:]], "the first came from prefill"
        assert workers.value(workers.decode, "pagewire:transfer_retries_total") == 2
        assert failures(workers, "peer") == own_tokens(workers) == 0
        assert bytes_of_kv(workers) == 7, "each block once"
        await until(lambda: not len(workers.prefill.worker.leases))


async def test_retries_are_bounded_and_then_decode_computes(model, expected, monkeypatch, caplog):
    Lossy(monkeypatch, 99)
    async with cluster(model, plane="grpc") as workers:
        request = workers.request(PROMPT, PARAMS, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
        # One block a message, so that there is something left to pull each time.
        monkeypatch.setattr(transfer_svc.service, "FRAME_BYTES", block_bytes(model, BLOCK_SIZE))
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        assert failures(workers, "peer") == 1
        assert workers.value(workers.decode, "pagewire:transfer_retries_total") == 2
        assert workers.value(workers.decode, "pagewire:recomputed_tokens_total") == own_tokens(workers) > 0
        await until(lambda: not len(workers.prefill.worker.leases))
    record = next(record for record in caplog.records if "the rest is computed here" in record.message)
    assert record.request_id == request.request_id
    assert record.trace_id == "ab" * 16


async def test_a_worker_out_of_reach_gets_its_ticket_back_later(model, expected, monkeypatch):
    """Decode computed the prompt meanwhile; the blocks must not wait for the end of a long lease."""
    attach, num_refused = TransferClient.attach, 0

    async def unreachable(self, ticket, timeout):
        nonlocal num_refused
        num_refused += 1
        if num_refused <= 4:
            raise Unavailable("Connection refused")
        return await attach(self, ticket, timeout)

    monkeypatch.setattr(TransferClient, "attach", unreachable)
    monkeypatch.setattr(decode_svc.intake, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(transfer_svc.peers, "_GIVE_BACK_PAUSES", (0.0, 0.01))
    async with cluster(model) as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        await until(lambda: not len(workers.prefill.worker.leases))
        assert num_refused == 5


async def test_by_policy_the_request_is_given_back(model, monkeypatch):
    Lossy(monkeypatch, 99)
    monkeypatch.setattr(transfer_svc.service, "FRAME_BYTES", block_bytes(model, BLOCK_SIZE))
    async with cluster(model, plane="grpc", kv_load_failure_policy="fail") as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        with pytest.raises(grpc.aio.AioRpcError, match=r"KV from .* failed after") as caught:
            await workers.decode_all(request, workers.ticket)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "KV_LOAD_FAILED")
        assert workers.value(workers.decode, "pagewire:transfers_failed_total") == 1
        assert own_tokens(workers) == workers.value(workers.decode, "pagewire:recomputed_tokens_total") == 0
        await until(lambda: not len(workers.prefill.worker.leases))


async def test_a_cancel_between_two_tries_gives_the_ticket_back(model, monkeypatch):
    Lossy(monkeypatch, 99)
    monkeypatch.setattr(decode_svc.intake, "RETRY_SECONDS", 60)
    async with cluster(model, plane="grpc") as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        decoding = asyncio.create_task(workers.decode_all(request, workers.ticket))
        await until(lambda: workers.value(workers.decode, "pagewire:transfer_retries_total"))
        decoding.cancel()
        await until(lambda: not len(workers.prefill.worker.leases))


async def test_a_first_token_that_does_not_exist_is_noticed(model, expected, monkeypatch):
    end = transfer_svc.client._end

    def bent(message, trailer):
        result = end(message, trailer)
        tokens = tuple(dataclasses.replace(token, token_id=1 << 20) for token in result.first_tokens)
        return dataclasses.replace(result, first_tokens=tokens)

    monkeypatch.setattr(transfer_svc.client, "_end", bent)
    async with cluster(model) as workers:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        assert failures(workers, "frame") == 1
